"""Processes that outlived whoever had to end them, found by a variable in their environment. Knows no program by its name."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

OWNER_VARIABLE = "GATEWAY_RUN_DIRECTORY"  # inherited by all that is started below; its value is a directory of one run
KILL_TIMEOUT_S = 5.0


def kill_processes_of(directory: Path) -> None:
    """Kills all whose owner is `directory`, or something in it, until there is none. Where there is no /proc it finds none."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while (pids := _processes_of(directory)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes_of(directory: Path) -> set[int]:
    """The owned ones and all below them: one that sets its title, as Ray's agents do, writes it over its variables."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    found = {pid for pid in parents if _is_owned(Path(f"/proc/{pid}/environ"), directory)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:  # gone
        return None


def _is_owned(environ: Path, directory: Path) -> bool:
    try:
        variables = environ.read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False
    start = f"{OWNER_VARIABLE}=".encode()
    owners = [Path(os.fsdecode(variable.removeprefix(start))) for variable in variables if variable.startswith(start)]
    return any(owner.is_relative_to(directory) for owner in owners)

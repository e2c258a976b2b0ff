"""A Ray cluster of our own on this machine, and the guardian process that it cannot outlive.

Ray's processes are many and loosely tied. When their starter is killed, two agents stay for a minute, waiting for a server that
is dead too. So the cluster is started by a small guardian, which imports no ray: whatever is started below it, actors included,
becomes its child again when orphaned (it is a "subreaper"), and at the end of its stdin, or when asked, it kills all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from cores.launch.child_process import ChildProcess, end_with_parent, read_task
from cores.launch.interface import LaunchError
from cores.launch.leftovers import OWNER_VARIABLE, kill_processes_of

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 5.0

_PR_SET_CHILD_SUBREAPER = 36
# We pass nothing through Ray's object store; this is the least that it accepts. By default it reserves a third of the memory.
_OBJECT_STORE_BYTES = 80_000_000

# A process of Ray's that has not reached the cluster's head for 60 s ends itself, ranks and launcher included, and with them
# everybody's streams. They need nothing of it: they may wait 23 days (in milliseconds it is still an int).
_OUTLIVE_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "2000000"}
# Of the whole cluster. Read by Ray's C++ code from the environment.
_CLUSTER_VARIABLES = {
    **_OUTLIVE_HEAD,
    # Ray gives its workers niceness 15: on a machine with other work a rank would get the cores last.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # An idle worker for each core, started in advance: 80 MiB each, and no rank ever uses one.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


class EmbeddedRayCluster:
    """The starter's end: starts the guardian and holds its stdin."""

    def __init__(self, directory: Path) -> None:
        self.address = ""
        self._directory = directory
        self._guardian: ChildProcess | None = None

    async def start(self) -> None:
        """Bounded. Raises `LaunchError` with Ray's own last words."""
        environment = _CLUSTER_VARIABLES | {OWNER_VARIABLE: str(self._directory)}
        self._guardian = await ChildProcess.start(
            "ray", "cores.launch.ray_cluster", {"directory": str(self._directory)}, environment=environment, answers=True
        )
        try:
            line = await asyncio.wait_for(self._guardian.read_line(), START_TIMEOUT_S + STOP_TIMEOUT_S)
        except TimeoutError:
            line = json.dumps({"error": f"no answer within {START_TIMEOUT_S:g} s"})
        answer = json.loads(line or '{"error": "its guardian process died"}')
        if "error" in answer:
            raise LaunchError(f"cannot start Ray on this machine: {answer['error']}")
        self.address = answer["address"]

    async def stop(self) -> None:
        if self._guardian is not None:
            self._guardian.close_stdin()
            await self._guardian.end(STOP_TIMEOUT_S)
            if self._guardian.returncode != 0:  # it was killed itself: nobody else ends what it watched over
                await asyncio.to_thread(kill_processes_of, self._directory)


def outlive_head() -> None:
    """The death of Ray's head is not ours. For this process; call it before `import ray`, which reads it once."""
    for name, value in _OUTLIVE_HEAD.items():
        os.environ.setdefault(name, value)


def use_own_token() -> None:
    """Makes this process, and all that it starts, use a token of this run. Call it before `import ray`, which reads it once.

    Ray listens on every interface, also when told 127.0.0.1, and whoever can talk to it can run code. It therefore asks for a
    token by default, but would write it into the user's home directory, where other clusters' tokens are.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


# --- the guardian -----------------------------------------------------------------------------------------------------


def main() -> None:
    directory = Path(read_task()["directory"])
    _adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: _end())
    end_with_parent(_end)
    _answer(_start_ray(directory))
    while True:
        signal.pause()


def _adopt_orphans() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _start_ray(directory: Path) -> dict[str, str]:
    directory.mkdir(mode=0o700, exist_ok=True)
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head",
        "--port=0",  # bound by Ray itself and read back: a port that was looked for first may be taken by then
        f"--temp-dir={directory}", f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-dashboard=false",
        "--include-log-monitor=false",  # ranks have a log pipe of their own
        "--no-monitor",  # of the autoscaler
        "--disable-usage-stats", "--log-style=record", "--log-color=false",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"`ray start` did not return within {START_TIMEOUT_S:g} s"}
    # Where Ray itself looks for a cluster of this machine; the only place where the bound port is written.
    address = directory / "ray_current_cluster"
    if done.returncode != 0 or not address.exists():
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        return {"error": " ".join(lines[-3:]) or f"`ray start` exited with code {done.returncode}"}
    return {"address": address.read_text().strip()}


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _end() -> NoReturn:
    """Kills everything below this process, until nothing is left. Nothing of Ray's own is worth a graceful end."""
    import psutil  # installed where ray is; a launcher without either imports this module, too

    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline_s:
            print(f"processes that do not die: {[child.pid for child in children]}", file=sys.stderr)
            break
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main()

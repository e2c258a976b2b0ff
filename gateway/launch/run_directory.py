"""The launcher's private directory: sockets, log pipes and Ray's session of one run. Gone when the run is over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from cores.launch.leftovers import kill_processes_of

_PREFIX = "gateway-"
_LOCK = "lock"
# A Unix socket's path may have 107 bytes, and Ray needs 70 below its directory.
_MAX_PARENT_LENGTH = 20


class RunDirectoryError(RuntimeError):
    """There is no place for sockets. One line."""


class RunDirectory:
    """As a context manager: made with mode 0700, removed at the end whatever happened."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._lock: int | None = None
        self.path = Path()

    def __enter__(self) -> RunDirectory:
        try:
            self._make(self._parent or _short_parent())
        except OSError as error:
            raise RunDirectoryError(f"cannot make a directory for sockets: {error}") from error
        return self

    def _make(self, parent: Path) -> None:
        _remove_abandoned(parent)
        made = Path(tempfile.mkdtemp(prefix="." + _PREFIX, dir=parent))
        # Held for as long as this process lives, and no longer, however it ends: says that the directory is in use.
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now under the name that other runs look for: one without a holder is fair game for them.
        self.path = made.rename(parent / made.name.removeprefix("."))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)

    def ipc(self, name: str) -> str:
        """The ZMQ address of a socket in here."""
        return f"ipc://{self.path / name}"


def _short_parent() -> Path:
    usual = Path(tempfile.gettempdir())
    return usual if len(bytes(usual)) <= _MAX_PARENT_LENGTH else Path("/tmp")


def _remove_abandoned(parent: Path) -> None:
    """Removes what runs have left that could not clean up (`kill -9`): directories whose lock nobody holds."""
    for lock_path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, in use, or removed by another run this very moment
            lock = os.open(lock_path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kill_processes_of(lock_path.parent)  # of a Ray whose guardian was killed, too
                _remove(lock_path.parent)
            finally:
                os.close(lock)


def _remove(directory: Path) -> None:
    """The lock last: where dying processes still make files, the next run finds the directory by it and tries again."""
    lock_path = directory / _LOCK
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path != lock_path:
            path.unlink(missing_ok=True)
    if list(directory.iterdir()) == [lock_path]:
        shutil.rmtree(directory, ignore_errors=True)

"""Where the front ends of one endpoint keep which adapters there are. Knows no ranks.

A file, because it outlives the front end that wrote it, and all of them see it change: whoever is asked for a model looks there
first. Its lock is held for a whole change, over all ranks, so changes and the restoring of a restarted rank come one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

LOCK_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """An adapter that is served as a model of its name."""

    name: str
    path: str
    id: str  # a hash of its files
    is_pinned: bool = False


Adapters = Mapping[str, LoraAdapter]  # by name


class LoraStore(Protocol):
    def read(self) -> Adapters | None:
        """As they are now; None: nobody has said yet."""
        ...

    def write(self, adapters: Adapters) -> None:
        """Only with the lock."""
        ...

    def locked(self) -> AbstractAsyncContextManager[None]: ...


class OwnLoraStore:
    """Of a front end that is alone."""

    def __init__(self) -> None:
        self._adapters: Adapters | None = None
        self._lock = asyncio.Lock()

    def read(self) -> Adapters | None:
        return self._adapters

    def write(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def locked(self) -> AbstractAsyncContextManager[None]:
        return self._lock


class SharedLoraStore:
    """Of all front ends of an endpoint: one file and one lock beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._adapters: Adapters | None = None
        self._seen: tuple[int, int, int] | None = None  # what the file was like when it was read

    def read(self) -> Adapters | None:
        """2 µs while nothing has changed."""
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(self._path)
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen != self._seen:
                adapters = msgspec.json.decode(self._path.read_bytes(), type=list[LoraAdapter])
                self._adapters, self._seen = {adapter.name: adapter for adapter in adapters}, seen
        return self._adapters

    def write(self, adapters: Adapters) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(list(adapters.values())))
        temporary.replace(self._path)  # a reader sees the old or the new, never half

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Among processes by the file's lock, which a process that dies gives back; within this one by an ordinary lock."""
        async with self._lock:
            fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                while not _try_lock(fd):  # noqa: ASYNC110  another process holds it: no event says when it lets go
                    await asyncio.sleep(LOCK_POLL_S)
                yield
            finally:
                os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

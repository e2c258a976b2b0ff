"""A value that all front ends of an endpoint share. Knows nothing of what it means.

A file, because it outlives the front end that wrote it, and all of them see it change. The lock is for whoever changes the
value and what it stands for: changes, and whatever must not meet one half done, come one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from gateway.errors import EngineGenerateError

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.01
LOCK_TIMEOUT_S = 120.0
T = TypeVar("T")
_changes: set[asyncio.Task[Any]] = set()  # the loop itself forgets tasks that nobody holds


class LockTimeoutError(EngineGenerateError):
    """Whoever holds the lock is stopped, or much slower than others can wait."""


class ValueStore(Protocol[T]):
    def read(self) -> T | None:
        """As it is now; None: nobody has said yet."""
        ...

    def write(self, value: T) -> None:
        """Only with the lock."""
        ...

    def locked(self) -> AbstractAsyncContextManager[None]: ...


class OwnValue(Generic[T]):
    """Of a front end that is alone."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._lock = asyncio.Lock()

    def read(self) -> T | None:
        return self._value

    def write(self, value: T) -> None:
        self._value = value

    def locked(self) -> AbstractAsyncContextManager[None]:
        return self._lock


class SharedValue(Generic[T]):
    """One file and one lock beside it. `kind` is the value's type, for the decoder."""

    def __init__(self, path: Path, kind: Any, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._path = path
        self._lock_timeout_s = lock_timeout_s
        self._lock = asyncio.Lock()
        self._decoder = msgspec.json.Decoder(kind)
        self._value: T | None = None
        self._seen: tuple[int, int, int] | None = None  # what the file was like when it was read

    def read(self) -> T | None:
        """2 µs while nothing has changed."""
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(self._path)
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen != self._seen:
                self._value, self._seen = self._decoder.decode(self._path.read_bytes()), seen
        return self._value

    def write(self, value: T) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(value))
        temporary.replace(self._path)  # a reader sees the old or the new, never half

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Among processes by the file's lock, which a process that dies gives back; within this one by an ordinary lock.
        Raises `LockTimeoutError`: one that is stopped gives back nothing."""
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._lock_timeout_s):
                    await held.enter_async_context(self._lock)
                    fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                    held.callback(os.close, fd)
                    while not _try_lock(fd):  # noqa: ASYNC110  another process holds it: no event says when it lets go
                        await asyncio.sleep(LOCK_POLL_S)
            except TimeoutError:
                what = f"another change of {self._path.stem} has not ended after {self._lock_timeout_s:g} s"
                raise LockTimeoutError(f"{what}: a front end may be stopped") from None
            yield


@contextlib.asynccontextmanager
async def locked_unless_stopped(store: ValueStore[Any], what: str) -> AsyncIterator[None]:
    """For what must be done although whoever has the lock may never give it back: then it meets the value as it is now."""
    async with contextlib.AsyncExitStack() as held:
        try:
            await held.enter_async_context(store.locked())
        except LockTimeoutError as error:
            logger.warning("%s as the group is now: %s", what, error)
        yield


async def to_its_end(change: Coroutine[Any, Any, T]) -> T:
    """A change goes on, with its lock, even if the caller leaves: ranks that were told of it do it."""
    task = asyncio.create_task(change, name="change of a shared value")
    _changes.add(task)
    task.add_done_callback(_changes.discard)
    return await asyncio.shield(task)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

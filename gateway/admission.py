"""Whether there is room for one more request, over all front ends of an endpoint. Knows no requests, only numbers.

The limits are the endpoint's, not one process's: every front end keeps what it has in flight in its own slot of a small shared
file, and reads the others'. A slot is written under the file's lock together with the decision, so two front ends cannot both
take the last place; it is freed by writing what is really in flight, on a timer, so no way out can forget to.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.config import AdmissionConfig
from gateway.errors import OverloadedError

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
RATE_WINDOW_S = 10.0
MAX_LOCK_TRIES = 200


@dataclass(frozen=True, slots=True)
class Usage:
    """What one front end has in flight: sequences, and those of their prompt tokens that no rank has reported yet."""

    num_requests: int = 0
    num_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.num_requests + other.num_requests, self.num_tokens + other.num_tokens)


class UsageSlots(Protocol):
    """Where a front end's usage stands for the others to see."""

    def set(self, usage: Usage) -> None: ...

    def others(self) -> Usage: ...

    def locked(self) -> AbstractContextManager[None]: ...


class OneFrontEnd:
    """There are no others."""

    def set(self, usage: Usage) -> None:
        pass

    def others(self) -> Usage:
        return Usage()

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield


class SharedSlots:
    """One slot per front end in a file that all of them map. A new life of a front end begins with an empty slot."""

    _SLOT = struct.Struct("<QQ")

    def __init__(self, path: Path, index: int, count: int) -> None:
        self._index = index
        self._count = count
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, count * self._SLOT.size)
        self._map = mmap.mmap(self._fd, count * self._SLOT.size)
        self.set(Usage())

    def set(self, usage: Usage) -> None:
        self._SLOT.pack_into(self._map, self._index * self._SLOT.size, usage.num_requests, usage.num_tokens)

    def others(self) -> Usage:
        slots = (Usage(*self._SLOT.unpack_from(self._map, i * self._SLOT.size)) for i in range(self._count) if i != self._index)
        return sum(slots, Usage())

    @contextmanager
    def locked(self) -> Iterator[None]:
        # It is held for microseconds. One that is not free after some tries is held by a stopped process, which must not stop
        # this one too: then two front ends may both take the last place.
        for _ in range(MAX_LOCK_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            os.sched_yield()
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


class DrainRate:
    """How many sequences end per second, over the last ten seconds."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def on_ended(self, count: int, now: float) -> None:
        self._ends.append((now, count))
        self._forget(now)

    def seconds_for(self, count: int, now: float) -> float:
        """Until `count` more have ended, at this rate; bounded, since a rate of zero says nothing."""
        self._forget(now)
        ended = sum(n for _, n in self._ends)
        if not ended:
            return MIN_RETRY_AFTER_S
        seconds = count * (now - self._ends[0][0]) / ended
        return min(max(math.ceil(seconds), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _forget(self, now: float) -> None:
        keep = next((i for i, (at_s, _) in enumerate(self._ends) if at_s > now - RATE_WINDOW_S), len(self._ends))
        del self._ends[:keep]


class Admission:
    """All or nothing: n sequences take n places or none."""

    def __init__(self, limits: AdmissionConfig, slots: UsageSlots) -> None:
        self.num_rejected = 0
        self.drain_rate = DrainRate()
        self._limits = limits
        self._slots = slots

    def refusal(self, own: Usage, more: Usage, now: float, *, reported_tokens: int = 0) -> OverloadedError | None:
        """Why `more` would be refused; None if there is room. Counts nothing. `reported_tokens` are what ranks say they have to
        compute, whoever sent it: every front end hears the same, so no slot may hold it."""
        present = own + self._slots.others()
        num_tokens = present.num_tokens + reported_tokens
        for what, are, limit, have, want in (
            ("requests", "in flight", self._limits.max_num_queued_requests, present.num_requests, more.num_requests),
            ("prompt tokens", "not yet computed", self._limits.max_num_queued_tokens, num_tokens, more.num_tokens),
        ):
            if limit is not None and have + want > limit:
                text = f"the server is full: {have} {what} of at most {limit} are {are}, {want} more came"
                # The rate is of sequences. How many tokens leave with each is not known: as many as came may do.
                num_to_end = have + want - limit if what == "requests" else more.num_requests
                return OverloadedError(text, self.drain_rate.seconds_for(max(1, num_to_end), now))
        return None

    def admit(self, own: Usage, more: Usage, now: float, *, reported_tokens: int = 0) -> None:
        """Takes the places. Raises `OverloadedError` if they are not there."""
        with self._slots.locked():
            refusal = self.refusal(own, more, now, reported_tokens=reported_tokens)
            if refusal is None:
                self._slots.set(own + more)
        if refusal is not None:
            self.num_rejected += 1
            raise refusal

    def refresh(self, own: Usage) -> None:
        """What is really in flight now. On a timer."""
        self._slots.set(own)

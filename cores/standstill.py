"""Whether an engine takes requests and makes steps, and why not. Pure.

Rules
-----
* Closed: no new requests. Frozen: no steps either, whatever it still holds.
* A pause or sleep that lets requests end first drains: the engine is closed until the last has ended, and frozen from then on.
* Sleep and pause are apart. An engine that was paused when it fell asleep is still paused when it has woken up.
* What sleeps is memory, by tag. The engine is asleep until all of it is back.
"""

from __future__ import annotations

from collections.abc import Sequence

from cores.messages import EngineState
from cores.utilities import OperationRefusedError

MEMORY_TAGS = ("weights", "kv_cache")


class Standstill:
    def __init__(self) -> None:
        self.is_paused = False
        self._asleep: frozenset[str] = frozenset()
        self._drains: set[int] = set()  # begun, and neither completed nor called off
        self._last_drain = 0

    @property
    def state(self) -> EngineState:
        if self._asleep:
            return EngineState.SLEEPING
        if self.is_paused:
            return EngineState.PAUSED
        return EngineState.DRAINING if self._drains else EngineState.READY

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    @property
    def is_frozen(self) -> bool:
        return self.is_paused or self.is_asleep

    @property
    def is_closed(self) -> bool:
        return self.is_frozen or bool(self._drains)

    def sleeps(self, tag: str) -> bool:
        return tag in self._asleep

    # --- coming to a halt ---

    def begin_drain(self) -> int:
        self._last_drain += 1
        self._drains.add(self._last_drain)
        return self._last_drain

    def check_drain(self, drain: int) -> None:
        """Raises if it was called off."""
        if drain not in self._drains:
            raise OperationRefusedError("called off by another pause or resume before all requests had ended")

    def end_drain(self, drain: int) -> None:
        self._drains.remove(drain)

    def call_off_drains(self) -> None:
        self._drains.clear()

    def pause(self) -> None:
        self.is_paused = True

    def fall_asleep(self) -> None:
        self._asleep = frozenset(MEMORY_TAGS)

    # --- going on ---

    def resume(self) -> None:
        """Also before a drain is over. Raises while asleep: what it would run with is not there."""
        if self._asleep:
            raise OperationRefusedError(f"it sleeps ({', '.join(sorted(self._asleep))}); wake it up instead")
        self.is_paused = False
        self.call_off_drains()

    def wake_up(self, tags: frozenset[str]) -> None:
        self._asleep -= tags

    def asleep_among(self, tags: Sequence[str] | None) -> frozenset[str]:
        """What of these there is to wake up; None: everything. Raises for a tag that does not exist."""
        if tags is None:
            return self._asleep
        if unknown := [tag for tag in tags if tag not in MEMORY_TAGS]:
            raise OperationRefusedError(f"tags must be of {', '.join(MEMORY_TAGS)}, got {unknown[0]!r}")
        return self._asleep & frozenset(tags)

    def check_invariants(self) -> None:
        assert self._asleep <= frozenset(MEMORY_TAGS)
        assert not self.is_frozen or self.is_closed
        assert (self.state is EngineState.READY) == (not self.is_closed)
        assert all(1 <= drain <= self._last_drain for drain in self._drains)

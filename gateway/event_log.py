"""The last things that happened to the ranks, for `/status`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.status import Event

MAX_EVENTS = 200


@dataclass(frozen=True, slots=True)
class _Entry:
    seq: int
    at_s: float
    kind: str
    rank: int | None
    epoch: int | None
    text: str


class EventLog:
    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque(maxlen=MAX_EVENTS)
        self._seq = 0

    def add(self, kind: str, rank: int | None, text: str, now: float, epoch: int | None = None) -> None:
        """With an `epoch` it is an event of that life of the rank, which happens once and all front ends see."""
        self._seq += 1
        self._entries.append(_Entry(self._seq, now, kind, rank, epoch, text))

    def events(self, now: float) -> tuple[Event, ...]:
        """Oldest first."""
        return tuple(
            Event(seq=e.seq, age_s=round(max(0.0, now - e.at_s), 3), kind=e.kind, rank=e.rank, text=e.text, epoch=e.epoch)
            for e in self._entries
        )

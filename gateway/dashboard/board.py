"""What is known: the last document of each endpoint, why there is no newer one, and the last minute. Knows no console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.dashboard.feed import Reading
from gateway.dashboard.history import WINDOW_S, History
from gateway.status import RankStatus, StatusSnapshot

COUNTERS = ("requests", "failed", "rejected", "aborted", "moved")  # of the totals: shown with what they did lately
RANK_SERIES = ("generation_tokens_per_s", "prompt_tokens_per_s", "waiting", "running", "kv_cache_usage")
RankKey = tuple[int, int]  # index of the endpoint, number of the rank


@dataclass(slots=True)
class Endpoint:
    """One endpoint as it was seen last."""

    url: str
    status: StatusSnapshot | None = None
    reading: Reading | None = None  # the one that `status` is of
    read_s: float = 0.0  # when that was
    error: str | None = None  # why the last look gave nothing
    asked_s: float | None = None  # when it was asked what it has not answered yet
    num_outages: int = 0
    back_s: float | None = None  # when the last outage ended

    def note(self, reading: Reading, now: float) -> None:
        self.asked_s = None
        if reading.status is None:
            if self.error is None:
                self.num_outages += self.status is not None
            self.error = reading.error or "unknown"
            return
        if self.error is not None and self.status is not None:
            self.back_s = now
        self.status, self.reading, self.read_s, self.error = reading.status, reading, now, None

    @property
    def is_stale(self) -> bool:
        return self.error is not None


class Board:
    """All endpoints, in the order in which they were given."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self.history = History()
        self.nodes: set[str] = set()  # all that ranks were ever seen on: of two, one may be lost

    def note(self, index: int, reading: Reading, now: float) -> None:
        """What a look at one endpoint gave."""
        self.endpoints[index].note(reading, now)
        if reading.status is not None:
            self._note_numbers(index, reading.status, now)
        for name in ("generation_tokens_per_s", "prompt_tokens_per_s"):
            self.history.note(name, self.rate(name), now)

    def _note_numbers(self, index: int, status: StatusSnapshot, now: float) -> None:
        note = self.history.note
        self.nodes.update(rank.node for rank in status.ranks if rank.node)
        for rank in status.ranks:
            for name in RANK_SERIES:
                note((name, index, rank.rank), getattr(rank, name), now)
        for name in COUNTERS:
            self.history.note_counter((name, index), getattr(status.totals, name), now)

    def rate(self, name: str) -> float:
        """Of all ranks together, as far as they can be seen."""
        return sum(
            float(getattr(rank, name))
            for endpoint in self.endpoints
            if endpoint.status is not None and endpoint.error is None
            for rank in endpoint.status.ranks
        )

    @property
    def statuses(self) -> list[StatusSnapshot]:
        return [endpoint.status for endpoint in self.endpoints if endpoint.status is not None]

    @property
    def ranks(self) -> list[tuple[RankKey, RankStatus]]:
        """As they were seen last, in the order of the documents."""
        return [
            ((index, rank.rank), rank)
            for index, endpoint in enumerate(self.endpoints)
            if endpoint.status is not None
            for rank in endpoint.status.ranks
        ]

    def has_name_clash(self) -> bool:
        """Ranks of several endpoints have the same numbers, so that a name needs the endpoint, too."""
        numbers = [number for (_, number), _ in self.ranks]
        return len(set(numbers)) < len(numbers)

    def total(self, name: str) -> int:
        return sum(getattr(status.totals, name) for status in self.statuses)

    def per_s(self, name: str, window_s: float = 10.0) -> float | None:
        """How fast one of the totals grows; None where no endpoint was looked at twice."""
        counters = [c for key, c in self.history.counters.items() if isinstance(key, tuple) and key[0] == name]
        known = [rate for rate in (counter.per_s(window_s) for counter in counters) if rate is not None]
        return sum(known) if known else None

    def growth(self, name: str) -> float:
        """Of one of the totals, in the last minute."""
        return sum(c.growth for key, c in self.history.counters.items() if isinstance(key, tuple) and key[0] == name)


__all__ = ["WINDOW_S", "Board", "Endpoint", "RankKey"]

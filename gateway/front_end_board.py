"""What the front ends of one endpoint tell each other, so that any of them can answer for all: a file each.

A front end replaces its file four times a second. Files, because they outlive the process that wrote them: one that starts anew
adds what its predecessors had counted, so no counter goes back, and one that is stopped is seen, with the age of its last word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.metrics import PlainHistograms
from gateway.status import LoraStatus, RankStatus, StatusSnapshot, Totals

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 0.25

_SHARES = ("requests_total", "requests_moved_away", "requests_moved_in")  # of a rank: every front end counts its own
_LIFETIME = (  # of a rank: every front end that was there sees the same
    "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions", "deaths",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """One front end's own picture. `at_s` is CLOCK_MONOTONIC, the same for all processes of a machine."""

    at_s: float
    snapshot: StatusSnapshot
    histograms: PlainHistograms = field(default_factory=dict)
    server_load: int = 0  # inference requests that its HTTP server has


class FrontEndBoard:
    """The files of one endpoint's front ends. `index` is ours."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self._directory = directory
        self._index = index
        self._count = count
        self._can_write = True

    def open(self) -> None:
        """What our predecessors counted becomes the past."""
        last = self._read(self._current(self._index))
        if last is not None:
            past = self._read(self._past(self._index))
            self._write(self._past(self._index), last if past is None else _sum_of_lives(past, last))
            self._current(self._index).unlink()

    def publish(self, report: Report) -> bool:
        """False when it cannot be written, to a full disk say: the others see how old our last word is, and serving goes on."""
        try:
            self._write(self._current(self._index), report)
        except OSError as error:
            if self._can_write:  # said once, not four times a second
                logger.error("the other front ends do not hear of this one: %s", error)
            self._can_write = False
        else:
            self._can_write = True
        return self._can_write

    def others(self) -> list[Report]:
        """The last word of each other front end."""
        return self._read_all(self._current(i) for i in range(self._count) if i != self._index)

    def past(self) -> list[Report]:
        """What front ends that are gone had counted."""
        return self._read_all(self._past(i) for i in range(self._count))

    def _current(self, index: int) -> Path:
        return self._directory / f"front-end-{index}.json"

    def _past(self, index: int) -> Path:
        return self._directory / f"front-end-{index}.past.json"

    def _read_all(self, paths: Iterable[Path]) -> list[Report]:
        return [report for path in paths if (report := self._read(path)) is not None]

    def _read(self, path: Path) -> Report | None:
        with contextlib.suppress(FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=Report)
        return None

    def _write(self, path: Path, report: Report) -> None:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(report))
        temporary.replace(path)  # a reader sees the old or the new, never half


def whole_endpoint(own: StatusSnapshot, others: Sequence[Report], past: Sequence[Report], now: float) -> StatusSnapshot:
    """The endpoint as all its front ends see it together. The ranks' states are ours: everybody is told the same. So are the
    events: all front ends write into one log."""
    front_ends = list(own.front_ends)
    for report in others:
        age_s = round(now - report.at_s, 3)
        front_ends += [dataclasses.replace(front_end, age_s=age_s) for front_end in report.snapshot.front_ends]
    counted = [report.snapshot for report in (*others, *past)]
    return dataclasses.replace(
        own,
        front_ends=tuple(sorted(front_ends, key=lambda front_end: front_end.index)),
        totals=_sum_of_totals([own.totals, *(snapshot.totals for snapshot in counted)]),
        ranks=tuple(_whole_rank(rank, others, counted) for rank in own.ranks),
        loras=_sum_of_loras([own, *(report.snapshot for report in others)]),
    )


def _whole_rank(own: RankStatus, others: Sequence[Report], counted: Sequence[StatusSnapshot]) -> RankStatus:
    living = [rank for report in others for rank in report.snapshot.ranks if rank.rank == own.rank]
    everybody = [own, *(rank for snapshot in counted for rank in snapshot.ranks if rank.rank == own.rank)]
    return dataclasses.replace(
        own,
        ledger_tokens=own.ledger_tokens + sum(rank.ledger_tokens for rank in living),
        **{name: sum(getattr(rank, name) for rank in everybody) for name in _SHARES},
        **{name: max(getattr(rank, name) for rank in everybody) for name in _LIFETIME},
    )


def _sum_of_loras(snapshots: Sequence[StatusSnapshot]) -> tuple[LoraStatus, ...]:
    """Ours are all there are, but for those that the others' requests still use. Each counts its own requests."""
    total: dict[str, LoraStatus] = {}
    own, *others = (snapshot.loras for snapshot in snapshots)
    for lora in (*own, *(lora for loras in others for lora in loras if lora.waiting or lora.running)):
        known = total.get(lora.name, LoraStatus(lora.name))
        total[lora.name] = LoraStatus(lora.name, known.waiting + lora.waiting, known.running + lora.running)
    return tuple(total.values())


def _sum_of_totals(totals: Sequence[Totals]) -> Totals:
    return Totals(**{f.name: sum(getattr(t, f.name) for t in totals) for f in dataclasses.fields(Totals)})


def _sum_of_lives(past: Report, last: Report) -> Report:
    """Two lives of one front end, as one."""
    snapshot = whole_endpoint(last.snapshot, [], [past], last.at_s)
    return Report(last.at_s, snapshot, sum_of_histograms([past.histograms, last.histograms]))


def sum_of_histograms(plains: Iterable[PlainHistograms]) -> PlainHistograms:
    total: PlainHistograms = {}
    for plain in plains:
        for rank, by_name in plain.items():
            into = total.setdefault(rank, {})
            for name, numbers in by_name.items():
                known = into.get(name)
                into[name] = numbers if known is None else [a + b for a, b in zip(known, numbers, strict=True)]
    return total

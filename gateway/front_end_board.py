"""What the front ends of one endpoint tell each other, so that any of them can answer for all: a file each.

A front end replaces its file four times a second, and before it answers a scrape: what one has shown, the next one knows. Files
outlive the process that wrote them: one that starts anew adds what its predecessors had counted, so no counter goes back, and
one that is stopped is seen, with the age of its last word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.metrics import PlainHistograms
from gateway.status import Lives, LoraStatus, RankStatus, StatusSnapshot, Totals

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 0.25

_SHARES = ("requests_total", "requests_moved_away", "requests_moved_in")  # of a rank: every front end counts its own


@dataclass(frozen=True, slots=True)
class Report:
    """One front end's own picture. `at_s` is CLOCK_MONOTONIC, the same for all processes of a machine."""

    at_s: float
    snapshot: StatusSnapshot
    histograms: PlainHistograms = field(default_factory=dict)
    server_load: int = 0  # inference requests that its HTTP server has


@dataclass(frozen=True, slots=True)
class _File:
    """Both in one, so that a reader never counts twice what has just become the past."""

    last: Report | None  # of the living front end
    past: Report | None  # of its predecessors, together


@dataclass(frozen=True, slots=True)
class Posted:
    """What was read of the board at one moment."""

    others: tuple[Report, ...] = ()  # the last word of each other front end
    past: tuple[Report, ...] = ()  # what front ends that are gone had counted

    @property
    def all(self) -> tuple[Report, ...]:
        return self.others + self.past


class FrontEndBoard:
    """The files of one endpoint's front ends. `index` is ours."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self._directory = directory
        self._index = index
        self._count = count
        self._past: Report | None = None
        self._published_s = 0.0
        self._can_write = True
        # Whoever waits for a write in a thread may leave in the middle, and the next one come while that thread still writes.
        self._publishing = threading.Lock()

    def open(self) -> None:
        """What our predecessors counted becomes the past. A disk that does not take it keeps what sums up to the same."""
        file = self._read(self._index)
        if file is None:
            return
        past = [report for report in (file.past, file.last) if report is not None]
        self._past = self._folded(_sum_of_lives(*past) if len(past) == 2 else past[0])
        self._try_write(None)

    def _folded(self, past: Report) -> Report:
        """Front ends that are restarted often must not keep for ever what those that live long fold."""
        ranks = tuple(
            dataclasses.replace(rank, lives=rank.lives.join(self.lives_of(rank.rank)).fold()) if rank.lives.is_long else rank
            for rank in past.snapshot.ranks
        )
        return dataclasses.replace(past, snapshot=dataclasses.replace(past.snapshot, ranks=ranks))

    def publish(self, report: Report) -> bool:
        """One that is older than the last is dropped. False when it cannot be written, to a full disk say: the others see how
        old our last word is, and serving goes on."""
        with self._publishing:
            if report.at_s < self._published_s:
                return True
            if is_written := self._try_write(report):
                self._published_s = report.at_s
            return is_written

    def read(self) -> Posted:
        files = [file for i in range(self._count) if i != self._index and (file := self._read(i)) is not None]
        pasts = [self._past, *(file.past for file in files)]
        return Posted(
            others=tuple(file.last for file in files if file.last is not None),
            past=tuple(past for past in pasts if past is not None),
        )

    def lives_of(self, rank: int) -> Lives:
        """What the other front ends know of a rank, and those that are gone knew."""
        return _joined(r for report in self.read().all for r in report.snapshot.ranks if r.rank == rank)

    def _path(self, index: int) -> Path:
        return self._directory / f"front-end-{index}.json"

    def _read(self, index: int) -> _File | None:
        with contextlib.suppress(FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
            return msgspec.json.decode(self._path(index).read_bytes(), type=_File)
        return None

    def _try_write(self, report: Report | None) -> bool:
        try:
            self._write(report)
        except OSError as error:
            if self._can_write:  # said once, not four times a second
                logger.error("the other front ends do not hear of this one: %s", error)
            self._can_write = False
        else:
            self._can_write = True
        return self._can_write

    def _write(self, report: Report | None) -> None:
        path = self._path(self._index)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(_File(report, self._past)))
        temporary.replace(path)  # a reader sees the old or the new, never half


def whole_endpoint(own: StatusSnapshot, posted: Posted, now: float) -> StatusSnapshot:
    """The endpoint as all its front ends see it together. The ranks' states are ours: everybody is told the same. So are the
    events: all front ends write into one log."""
    front_ends = list(own.front_ends)
    for report in posted.others:
        age_s = round(max(0.0, now - report.at_s), 3)
        front_ends += [dataclasses.replace(front_end, age_s=age_s) for front_end in report.snapshot.front_ends]
    counted = [report.snapshot for report in posted.all]
    starts_s = [now - own.uptime_s, *(report.at_s - report.snapshot.uptime_s for report in posted.all)]
    return dataclasses.replace(
        own,
        uptime_s=round(now - min(starts_s), 3),
        front_ends=tuple(sorted(front_ends, key=lambda front_end: front_end.index)),
        totals=_sum_of_totals([own.totals, *(snapshot.totals for snapshot in counted)]),
        ranks=tuple(_whole_rank(rank, posted.others, counted) for rank in own.ranks),
        loras=_sum_of_loras([own, *(report.snapshot for report in posted.others)]),
    )


def _whole_rank(own: RankStatus, others: Sequence[Report], counted: Sequence[StatusSnapshot]) -> RankStatus:
    living = [rank for report in others for rank in report.snapshot.ranks if rank.rank == own.rank]
    everybody = [own, *(rank for snapshot in counted for rank in snapshot.ranks if rank.rank == own.rank)]
    lives = _joined(everybody)
    return dataclasses.replace(
        own,
        ledger_tokens=own.ledger_tokens + sum(rank.ledger_tokens for rank in living),
        ledger_requests=own.ledger_requests + sum(rank.ledger_requests for rank in living),
        lives=lives,
        **lives.totals,
        **{name: sum(getattr(rank, name) for rank in everybody) for name in _SHARES},
    )


def _joined(ranks: Iterable[RankStatus]) -> Lives:
    return functools.reduce(Lives.join, (rank.lives for rank in ranks), Lives())


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
    snapshot = whole_endpoint(last.snapshot, Posted(past=(past,)), last.at_s)
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

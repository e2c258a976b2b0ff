"""Several front ends answer as one endpoint, and no counter goes back when one of them starts again."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.front_end_board import FrontEndBoard, Posted, Report, whole_endpoint
from gateway.metrics import RequestMetrics
from gateway.output_statistics import TokenTimes
from gateway.server.state import ServerState
from gateway.status import NUM_LIVES_KEPT, FrontEndStatus, LifeCounters, Lives, LoraStatus, RankStatus, StatusSnapshot, Totals


def make_snapshot(index: int, requests: int, by_epoch: dict[int, LifeCounters] | None = None, **rank: int) -> StatusSnapshot:
    lives = Lives(by_epoch or {})
    return StatusSnapshot(
        version="1",
        mode="AsyncMPClient",
        model="m",
        uptime_s=1.0,
        state="ready",
        front_ends=(FrontEndStatus(index=index, pid=100 + index, in_flight=requests),),
        ranks=(RankStatus(rank=0, epoch=1, state="ready", waiting=7, lives=lives, **lives.totals, **rank),),
        totals=Totals(requests=requests, generation_tokens=10 * requests),
    )


def make_metrics(*ttft_s: float) -> RequestMetrics:
    metrics = RequestMetrics()
    metrics.on_tokens(TokenTimes(rank=0, time_to_first_token_s=list(ttft_s)))
    return metrics


def num_first_tokens(metrics: RequestMetrics) -> int:
    return sum(metrics.by_rank[0].time_to_first_token.counts)


def test_any_front_end_answers_for_all(tmp_path: Path) -> None:
    boards = [FrontEndBoard(tmp_path, index, 2) for index in range(2)]
    for board in boards:
        board.open()
    lives = {1: LifeCounters(generation_tokens=60, deaths=1), 2: LifeCounters(generation_tokens=30)}
    other = make_snapshot(1, 5, lives, requests_total=5, ledger_tokens=50, ledger_requests=2)
    boards[1].publish(Report(10.0, other, make_metrics(0.1, 0.2).to_plain()))
    own = make_snapshot(0, 3, {2: LifeCounters(generation_tokens=40)}, requests_total=3, ledger_tokens=30, ledger_requests=1)
    whole = whole_endpoint(own, boards[0].read(), now=12.0)
    assert [(f.index, f.in_flight, f.age_s) for f in whole.front_ends] == [(0, 3, 0.0), (1, 5, 2.0)]
    assert (whole.totals.requests, whole.totals.generation_tokens) == (8, 80)
    (rank,) = whole.ranks
    assert (rank.requests_total, rank.ledger_tokens, rank.ledger_requests) == (8, 80, 3)  # each counts its own
    assert rank.waiting == 7  # everybody is told the same
    assert whole.uptime_s == 3.0  # of the one that was there first: ours has started again
    assert (rank.generation_tokens, rank.deaths) == (100, 1)  # of each life what its best witness saw
    metrics = make_metrics(0.3).plus(report.histograms for report in boards[0].read().all)
    assert num_first_tokens(metrics) == 3


def test_counters_go_on_where_the_predecessors_stopped(tmp_path: Path) -> None:
    for life in range(3):
        board = FrontEndBoard(tmp_path, 0, 1)
        board.open()
        # Each of them sees another life of the rank.
        snapshot = make_snapshot(0, 4, {life: LifeCounters(prompt_tokens=10, deaths=1)}, requests_total=4, ledger_tokens=9)
        metrics = make_metrics(0.1)
        whole = whole_endpoint(snapshot, board.read(), now=1.0)
        assert whole.totals.requests == 4 * (life + 1)
        assert whole.ranks[0].requests_total == 4 * (life + 1)
        assert whole.ranks[0].ledger_tokens == 9  # what the dead had booked is gone with them
        assert (whole.ranks[0].deaths, whole.ranks[0].prompt_tokens) == (life + 1, 10 * (life + 1))
        assert len(whole.front_ends) == 1
        assert num_first_tokens(metrics.plus(r.histograms for r in board.read().all)) == life + 1
        board.publish(Report(1.0, snapshot, metrics.to_plain()))


class Witness:
    """A front end and what it has seen of rank 0, as `Rank` keeps it. It may miss the end of a life, or be replaced."""

    def __init__(self, directory: Path, index: int) -> None:
        self.board = FrontEndBoard(directory, index, 2)
        self.board.open()
        self.past, self.epoch, self.seen = Lives(), 0, LifeCounters()

    @property
    def lives(self) -> Lives:
        return self.past.join(Lives({self.epoch: self.seen}))

    def begin_life(self, epoch: int) -> None:
        self.past = self.lives
        if self.past.is_long:
            self.past = self.past.join(self.board.lives_of(0)).fold()
        self.epoch, self.seen = epoch, LifeCounters()

    def total(self) -> int:
        snapshot = dataclasses.replace(
            make_snapshot(0, 0), ranks=(RankStatus(rank=0, epoch=1, state="ready", lives=self.lives),)
        )
        self.board.publish(Report(0.0, snapshot))
        (rank,) = whole_endpoint(snapshot, self.board.read(), now=1.0).ranks
        assert len(rank.lives.by_epoch) <= 2 * NUM_LIVES_KEPT
        return rank.generation_tokens


@pytest.mark.parametrize("seed", range(5))
def test_early_lives_are_one_sum_and_no_front_end_shows_less_than_another_has_shown(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    front_ends = [Witness(tmp_path, index) for index in range(2)]
    shown = truth = 0
    for epoch in range(1, 120):
        num_tokens = rng.randrange(100)
        truth += num_tokens
        for index in rng.sample([0, 1], 2):
            if rng.random() < 0.1:  # killed and started again
                front_ends[index] = Witness(tmp_path, index)
            front_ends[index].begin_life(epoch)
        witness = rng.randrange(2)  # of the whole life; the other one misses its end
        for index, front_end in enumerate(front_ends):
            share = 1.0 if index == witness else rng.random()
            front_end.seen = LifeCounters(generation_tokens=int(share * num_tokens))
            total = front_end.total()
            assert total >= shown
            shown = total
        for front_end in front_ends:
            assert front_end.total() == truth


def test_what_becomes_the_past_is_never_counted_twice_nor_missed(tmp_path: Path) -> None:
    reader, writer = FrontEndBoard(tmp_path, 0, 2), FrontEndBoard(tmp_path, 1, 2)
    writer.open()
    writer.publish(Report(1.0, make_snapshot(1, 6)))
    own = make_snapshot(0, 1)
    for _ in range(3):  # lives that end before their first word
        FrontEndBoard(tmp_path, 1, 2).open()
        assert whole_endpoint(own, reader.read(), now=2.0).totals.requests == 7


def test_an_older_report_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    reader, writer = FrontEndBoard(tmp_path, 0, 2), FrontEndBoard(tmp_path, 1, 2)
    writer.publish(Report(2.0, make_snapshot(1, 6)))
    assert writer.publish(Report(1.0, make_snapshot(1, 5)))
    assert [report.at_s for report in reader.read().others] == [2.0]


class SlowBoard(FrontEndBoard):
    """Its first write goes on until the test lets it end, or another one has come in between."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 0, 1)
        self.is_writing, self.may_end = asyncio.Event(), threading.Event()
        self.writers: list[int] = []  # how many there were, at the beginning of each
        self._num_writers = 0
        self._loop = asyncio.get_running_loop()

    def _write(self, report: Report | None) -> None:
        self._num_writers += 1
        self.writers.append(self._num_writers)
        if len(self.writers) == 1:
            self._loop.call_soon_threadsafe(self.is_writing.set)
            self.may_end.wait(60.0)
        else:
            self.may_end.set()
        super()._write(report)
        self._num_writers -= 1


async def test_a_scraper_that_leaves_in_the_middle_does_not_let_two_threads_write_one_file(tmp_path: Path) -> None:
    board = SlowBoard(tmp_path)
    state = ServerState(GatewayConfig(), board=board)
    scrape = asyncio.create_task(state.publish(Report(1.0, make_snapshot(0, 1))))
    await board.is_writing.wait()
    scrape.cancel()
    await asyncio.gather(scrape, return_exceptions=True)
    following = asyncio.create_task(state.publish(Report(2.0, make_snapshot(0, 2))))
    # Time for a second writer to come, which it must not: it would set this itself.
    await asyncio.to_thread(board.may_end.wait, 0.2)
    board.may_end.set()
    await following
    assert board.writers == [1, 1]
    assert [report.at_s for report in FrontEndBoard(tmp_path, 1, 2).read().others] == [2.0]


def test_a_disk_that_takes_nothing_costs_the_others_our_numbers_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = FrontEndBoard(tmp_path / "gone", 0, 2)
    report = Report(1.0, make_snapshot(0, 1))
    assert not board.publish(report)
    assert not board.publish(report)
    assert len(caplog.records) == 1
    (tmp_path / "gone").mkdir()
    assert board.publish(report)


def test_a_front_end_that_starts_on_a_full_disk_serves_and_counts_what_its_predecessors_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FrontEndBoard(tmp_path, 1, 2).publish(Report(1.0, make_snapshot(1, 6)))
    new_file = tmp_path / f"front-end-1.{os.getpid()}"
    new_file.symlink_to("/dev/full")
    reader, board = FrontEndBoard(tmp_path, 0, 2), FrontEndBoard(tmp_path, 1, 2)
    board.open()
    assert not board.publish(Report(2.0, make_snapshot(1, 2)))
    assert [record.message for record in caplog.records] == [
        "the other front ends do not hear of this one: [Errno 28] No space left on device"
    ]
    assert whole_endpoint(make_snapshot(1, 2), board.read(), now=3.0).totals.requests == 8
    assert whole_endpoint(make_snapshot(0, 0), reader.read(), now=3.0).totals.requests == 6
    new_file.unlink()
    assert board.publish(Report(3.0, make_snapshot(1, 2)))
    assert whole_endpoint(make_snapshot(0, 0), reader.read(), now=3.0).totals.requests == 8


def test_a_broken_file_is_nobody(tmp_path: Path) -> None:
    board = FrontEndBoard(tmp_path, 0, 2)
    (tmp_path / "front-end-1.json").write_text('{"at_s": "soon"}')
    assert board.read() == Posted()


def test_requests_for_an_adapter_are_those_of_all_front_ends(tmp_path: Path) -> None:
    boards = [FrontEndBoard(tmp_path, index, 2) for index in range(2)]
    other = dataclasses.replace(
        make_snapshot(1, 5), loras=(LoraStatus("sql", 1, 2), LoraStatus("used", 0, 1), LoraStatus("removed"))
    )
    boards[1].publish(Report(10.0, other))
    own = dataclasses.replace(make_snapshot(0, 3), loras=(LoraStatus("sql", 4, 0),))
    whole = whole_endpoint(own, boards[0].read(), now=12.0)
    assert whole.loras == (LoraStatus("sql", 5, 2), LoraStatus("used", 0, 1))

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from balancer.ledger import LoadLedger, UnknownRankIdError
from cores.messages import RankId, RankLoad

RANK = RankId(0, 1)
OTHER = RankId(1, 1)


@pytest.fixture
def ledger() -> Iterator[LoadLedger]:
    ledger = LoadLedger()
    for rank_id in (RANK, OTHER):
        ledger.add_rank(rank_id, max_num_batched_tokens=2048, max_num_seqs=64)
    yield ledger
    ledger.check_invariants()


def dispatch(ledger: LoadLedger, handle: int, seq: int, num_prompt_tokens: int = 100, rank_id: RankId = RANK) -> None:
    ledger.book(handle, rank_id, num_prompt_tokens)
    ledger.on_sent(handle, seq)


def test_view_before_any_report_is_our_own_bookings(ledger: LoadLedger) -> None:
    ledger.book(1, RANK, 300)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_prefill_tokens, view.own_in_flight) == (1, 300, 1)
    assert view.reported_at is None
    assert (view.max_num_batched_tokens, view.max_num_seqs) == (2048, 64)


def test_report_replaces_the_bookings_that_it_contains(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    dispatch(ledger, 2, seq=2)
    load = RankLoad(num_running=1, num_decodes=1, num_kv_blocks_used=1, num_kv_blocks=4, step_ms=7.0, prefill_tokens_per_s=9e3)
    ledger.on_report(RANK, step=3, command_seq=1, load=load, now=1.0)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_running, view.num_prefill_tokens, view.num_decodes) == (1, 1, 100, 1)
    assert (view.kv_cache_usage, view.step_ms, view.prefill_tokens_per_s, view.reported_at) == (0.25, 7.0, 9e3, 1.0)
    assert ledger.num_unreported_tokens == 100


# Seen in the field: a snapshot that overwrites what was dispatched after it was taken, in the middle of a burst.
def test_snapshot_taken_before_a_burst_does_not_erase_it(ledger: LoadLedger) -> None:
    for handle in range(1, 51):
        dispatch(ledger, handle, seq=handle)
    ledger.on_report(
        RANK, step=1, command_seq=0, load=RankLoad(), now=0.1
    )  # of an idle rank, still on its way during the burst
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_prefill_tokens) == (50, 5000)


def test_example_in_the_documentation(ledger: LoadLedger) -> None:
    """docs/balancing.md, row by row."""

    def seen() -> tuple[int, int, int]:
        view = ledger.view(RANK)
        return view.num_waiting, view.num_running, view.num_prefill_tokens

    dispatch(ledger, 1, seq=1, num_prompt_tokens=400)
    dispatch(ledger, 2, seq=2, num_prompt_tokens=1000)
    assert seen() == (2, 0, 1400)
    ledger.on_report(RANK, step=7, command_seq=1, load=RankLoad(num_running=1, num_decodes=1), now=0.0)
    ledger.on_first_token(1)
    assert seen() == (1, 1, 1000)
    dispatch(ledger, 3, seq=3, num_prompt_tokens=200)
    assert seen() == (2, 1, 1200)
    ledger.release(1, abort_seq=4)
    assert seen() == (2, 0, 1200)
    assert not ledger.on_report(RANK, step=6, command_seq=0, load=RankLoad(), now=0.0)
    assert seen() == (2, 0, 1200)
    load = RankLoad(num_waiting=1, num_running=2, num_decodes=1, num_prefill_tokens=700)
    ledger.on_report(RANK, step=8, command_seq=3, load=load, now=0.0)
    assert seen() == (1, 1, 700)
    load = RankLoad(num_running=2, num_decodes=2)
    ledger.on_report(RANK, step=9, command_seq=4, load=load, now=0.0)
    assert seen() == (0, 2, 0)


def test_older_report_that_arrives_late_changes_nothing(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    assert ledger.on_report(RANK, step=9, command_seq=1, load=RankLoad(num_running=1), now=1.0)
    before = replace(ledger.view(RANK))
    assert not ledger.on_report(RANK, step=8, command_seq=1, load=RankLoad(num_waiting=30), now=2.0)
    assert not ledger.on_report(RANK, step=9, command_seq=0, load=RankLoad(num_waiting=30), now=2.0)
    assert ledger.view(RANK) == before


def test_repeated_report_of_an_idle_rank_keeps_it_fresh(ledger: LoadLedger) -> None:
    ledger.on_report(RANK, step=4, command_seq=0, load=RankLoad(), now=1.0)
    assert ledger.on_report(RANK, step=4, command_seq=0, load=RankLoad(), now=6.0)
    assert ledger.view(RANK).reported_at == 6.0


def test_report_of_another_life_of_the_rank_is_ignored(ledger: LoadLedger) -> None:
    ledger.remove_rank(RANK)
    ledger.add_rank(RankId(0, 2), max_num_batched_tokens=2048, max_num_seqs=64)
    assert not ledger.on_report(RANK, step=99, command_seq=99, load=RankLoad(num_waiting=7), now=1.0)
    assert not ledger.on_report(RankId(0, 3), step=99, command_seq=99, load=RankLoad(num_waiting=7), now=1.0)
    assert ledger.view(RankId(0, 2)).num_waiting == 0


def test_release_happens_once_whoever_comes_first(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    assert ledger.release(1)
    assert not ledger.release(1)
    assert not ledger.release(1, abort_seq=2)
    assert not ledger.release(404)
    assert ledger.num_in_flight == 0
    assert ledger.booked_tokens(RANK) == 0


def test_booking_of_a_failed_send_leaves_no_trace(ledger: LoadLedger) -> None:
    ledger.book(1, RANK, 100)
    ledger.release(1)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_prefill_tokens, view.own_in_flight) == (0, 0, 0)


def test_request_that_finished_by_itself_is_not_taken_off_twice(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    dispatch(ledger, 2, seq=2)
    ledger.on_report(RANK, step=5, command_seq=2, load=RankLoad(num_running=1, num_decodes=1), now=1.0)  # 1 finished in step 5
    ledger.release(1)
    assert ledger.view(RANK).num_requests == 1


def test_abort_after_the_first_token_takes_a_decode_off_until_it_is_reported(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    ledger.on_report(RANK, step=5, command_seq=1, load=RankLoad(num_waiting=2, num_running=3, num_decodes=3), now=1.0)
    ledger.on_first_token(1)
    ledger.release(1, abort_seq=2)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_running, view.num_decodes, view.own_in_flight) == (2, 2, 2, 0)
    ledger.on_report(RANK, step=6, command_seq=2, load=RankLoad(num_waiting=2, num_running=2, num_decodes=2), now=1.1)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_running, view.num_decodes) == (2, 2, 2)


def test_abort_while_queued_keeps_the_tokens_until_the_rank_says_how_many_are_gone(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1, num_prompt_tokens=1000)
    ledger.on_report(RANK, step=5, command_seq=1, load=RankLoad(num_waiting=1, num_prefill_tokens=1000), now=1.0)
    ledger.release(1, abort_seq=2)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_prefill_tokens) == (0, 1000)
    ledger.on_report(RANK, step=6, command_seq=2, load=RankLoad(), now=1.1)
    assert ledger.view(RANK).num_prefill_tokens == 0


def test_abort_during_prefill_is_taken_off_the_running_where_nobody_waits(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1, num_prompt_tokens=1000)
    ledger.on_report(RANK, step=5, command_seq=1, load=RankLoad(num_running=2, num_prefill_tokens=400), now=1.0)
    ledger.release(1, abort_seq=2)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_running) == (0, 1)


def test_request_that_comes_and_goes_between_two_reports_is_never_seen(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    ledger.release(1, abort_seq=2)
    assert ledger.view(RANK).num_requests == 0
    # The report is of the moment between dispatch and abort.
    ledger.on_report(RANK, step=1, command_seq=1, load=RankLoad(num_waiting=1, num_prefill_tokens=100), now=0.1)
    assert ledger.view(RANK).num_requests == 0
    ledger.on_report(RANK, step=2, command_seq=2, load=RankLoad(), now=0.2)
    assert ledger.view(RANK).num_requests == 0


def test_abort_that_crosses_the_end_of_its_request_never_makes_a_view_negative(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    ledger.on_first_token(1)
    ledger.on_report(RANK, step=5, command_seq=1, load=RankLoad(), now=1.0)  # finished; its last output is not handled yet
    ledger.release(1, abort_seq=2)
    view = ledger.view(RANK)
    assert (view.num_waiting, view.num_running, view.num_decodes, view.num_prefill_tokens) == (0, 0, 0, 0)


# Seen in the field: a topology change that forgets live bookings, and a restarted worker that keeps the old one's.
def test_death_releases_exactly_what_was_booked_there(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    ledger.book(2, RANK, 50)
    dispatch(ledger, 3, seq=1, rank_id=OTHER)
    assert sorted(ledger.remove_rank(RANK)) == [1, 2]
    assert ledger.remove_rank(RANK) == []
    assert not ledger.release(1)
    assert ledger.rank_of(1) is None
    assert ledger.rank_of(3) == OTHER
    assert ledger.handles_on(RANK) == []
    assert ledger.handles_on(OTHER) == [3]
    assert ledger.num_in_flight == 1
    ledger.add_rank(RankId(0, 2), max_num_batched_tokens=2048, max_num_seqs=64)
    assert ledger.view(RankId(0, 2)).num_requests == 0


def test_moved_request_is_booked_again_under_the_same_handle(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=1)
    ledger.remove_rank(RANK)
    dispatch(ledger, 1, seq=1, rank_id=OTHER)
    assert ledger.rank_of(1) == OTHER


# Seen in the field: one count leaked per disconnect, until a restarted worker gets everything.
def test_many_random_ends_leave_nothing_behind(ledger: LoadLedger) -> None:
    rng = random.Random(7)
    live: list[int] = []
    seqs = {RANK: 0, OTHER: 0}
    for handle in range(20_000):
        rank_id = rng.choice((RANK, OTHER))
        seqs[rank_id] += 1
        dispatch(ledger, handle, seqs[rank_id], rng.randrange(1, 5000), rank_id)
        live.append(handle)
        while len(live) > 200 or (live and rng.random() < 0.5):
            ended = live.pop(rng.randrange(len(live)))
            abort_seq = None
            if rng.random() < 0.5:
                held_by = ledger.rank_of(ended)
                assert held_by is not None
                abort_seq = seqs[held_by] = seqs[held_by] + 1
            assert ledger.release(ended, abort_seq)
            assert not ledger.release(ended)
        if rng.random() < 0.1:
            ledger.on_report(rank_id, handle, rng.randrange(seqs[rank_id] + 1), RankLoad(), now=handle / 1000)
        assert ledger.num_in_flight == len(live)
    for handle in live:
        ledger.release(handle)
    for rank_id, seq in seqs.items():
        ledger.on_report(rank_id, 20_001, seq, RankLoad(), now=21.0)
        view = ledger.view(rank_id)
        assert (view.num_requests, view.num_prefill_tokens, view.own_in_flight) == (0, 0, 0)
        assert ledger.booked_tokens(rank_id) == 0


def test_misuse_is_named(ledger: LoadLedger) -> None:
    dispatch(ledger, 1, seq=5)
    with pytest.raises(ValueError, match=r"request 1 is booked already, on rank 0 \(epoch 1\)"):
        ledger.book(1, OTHER, 10)
    with pytest.raises(UnknownRankIdError, match=r"rank 9 \(epoch 1\) is not in the ledger; there are rank 0"):
        ledger.book(2, RankId(9, 1), 10)
    with pytest.raises(ValueError, match="already"):
        ledger.add_rank(RANK, max_num_batched_tokens=1, max_num_seqs=1)
    with pytest.raises(ValueError, match="sent twice"):
        ledger.on_sent(1, seq=6)
    ledger.book(2, RANK, 10)
    with pytest.raises(ValueError, match="command 5 is not after 5"):
        ledger.on_sent(2, seq=5)


def test_views_are_in_rank_order_follow_every_booking_and_end_with_their_rank(ledger: LoadLedger) -> None:
    views = ledger.views([OTHER, RANK])
    assert [view.rank_id for view in views] == [RANK, OTHER]
    ledger.book(1, OTHER, 100)
    assert [view.own_in_flight for view in views] == [0, 1]
    assert list(ledger.views([OTHER, RANK])) == list(views)
    ledger.remove_rank(RANK)
    with pytest.raises(UnknownRankIdError, match="rank 0"):
        ledger.views([OTHER, RANK])
    assert [view.rank_id for view in ledger.views([OTHER])] == [OTHER]

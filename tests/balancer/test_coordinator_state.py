from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.coordinator_state import (
    MAX_PUBLISH_INTERVAL_S,
    MEMBER_TIMEOUT_S,
    MIN_PUBLISH_INTERVAL_S,
    CoordinatorState,
    Publish,
)
from cores.messages import GroupLoads, MemberReport, RankId, RankLoad


@pytest.fixture
def state() -> Iterator[CoordinatorState]:
    state = CoordinatorState(now=0.0)
    yield state
    state.check_invariants()


def make_report(
    member: str = "a", rank: int = 0, *, waiting: int = 0, state: str = "ready", url: str = "http://a"
) -> MemberReport:
    return MemberReport(member, url, ((RankId(rank, 1), state, RankLoad(num_waiting=waiting)),))


def published_at(state: CoordinatorState, times: list[float]) -> list[float]:
    return [now for now in times if state.on_timer(now) is not None]


def test_first_report_is_published_at_once_when_the_last_is_long_ago(state: CoordinatorState) -> None:
    state.on_report(make_report(waiting=3), now=0.5)
    rows = ((RankId(0, 1), "ready", RankLoad(num_waiting=3), "http://a", 0.25),)
    assert state.on_timer(0.75) == Publish(GroupLoads(1, rows), ("a",))


def test_nobody_to_tell_is_no_publication(state: CoordinatorState) -> None:
    assert state.on_timer(100.0) is None
    assert state.wait_s(100.0) == MAX_PUBLISH_INTERVAL_S


def test_changes_are_published_together_and_no_faster_than_allowed(state: CoordinatorState) -> None:
    state.on_report(make_report(waiting=0), now=1.0)
    assert state.on_timer(1.0) is not None
    state.on_report(make_report(waiting=1), now=1.01)
    assert state.on_timer(1.01) is None
    state.on_report(make_report(waiting=2), now=1.02)
    assert state.on_timer(1.02) is None
    assert state.wait_s(1.02) == pytest.approx(0.03)
    publish = state.on_timer(1.0 + MIN_PUBLISH_INTERVAL_S)
    assert publish is not None
    assert publish.loads.ranks[0][2].num_waiting == 2
    assert publish.loads.seq == 2


def test_unchanged_group_is_published_once_a_second(state: CoordinatorState) -> None:
    times = [tick / 8 for tick in range(8, 33)]
    for now in times:
        state.on_report(make_report(), now)
    assert published_at(state, times) == [1.0, 2.0, 3.0, 4.0]


def test_input_that_never_pauses_does_not_starve_publication(state: CoordinatorState) -> None:
    published = []
    for tick in range(2048):  # a report every millisecond or so, the timer right behind it
        now = 1.0 + tick / 1024
        state.on_report(make_report(waiting=tick), now)
        if state.on_timer(now) is not None:
            published.append(now)
    gaps = [later - earlier for earlier, later in pairwise(published)]
    assert min(gaps) >= MIN_PUBLISH_INTERVAL_S
    assert max(gaps) < MIN_PUBLISH_INTERVAL_S + 2 / 1024


def test_silent_member_expires_and_the_others_are_told(state: CoordinatorState) -> None:
    state.on_report(make_report("a", 0), now=0.0)
    for now in (0.0, 1.0, 2.0, 2.9):
        state.on_report(make_report("b", 1), now)
        state.on_timer(now)
    assert state.wait_s(2.9) == pytest.approx(MEMBER_TIMEOUT_S - 2.9)
    publish = state.on_timer(MEMBER_TIMEOUT_S)
    assert publish is not None
    assert publish.members == ("b",)
    assert [row[0].rank for row in publish.loads.ranks] == [1]


def test_member_that_leaves_is_gone_at_once(state: CoordinatorState) -> None:
    state.on_report(make_report("a", 0), now=1.0)
    state.on_report(make_report("b", 1), now=1.0)
    state.on_timer(1.0)
    state.on_left("a")
    state.on_left("never heard of")
    publish = state.on_timer(1.1)
    assert publish is not None
    assert publish.members == ("b",)


def test_rank_that_two_front_ends_report_has_one_row_with_the_newest_word(state: CoordinatorState) -> None:
    state.on_report(make_report("a", waiting=1), now=1.0)
    state.on_report(make_report("b", waiting=2), now=1.1)
    state.on_report(make_report("a", waiting=3), now=1.2)
    publish = state.on_timer(1.25)
    assert publish is not None
    ((_, _, load, _, age_s),) = publish.loads.ranks
    assert (load.num_waiting, age_s) == (3, pytest.approx(0.05))
    assert set(publish.members) == {"a", "b"}


def test_restarted_rank_replaces_its_old_life(state: CoordinatorState) -> None:
    state.on_report(MemberReport("a", "", ((RankId(0, 1), "dead", RankLoad()),)), now=1.0)
    state.on_report(MemberReport("a", "", ((RankId(0, 2), "starting", RankLoad()),)), now=1.1)
    publish = state.on_timer(1.1)
    assert publish is not None
    assert [(rank_id, word) for rank_id, word, *_ in publish.loads.ranks] == [(RankId(0, 2), "starting")]


events = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["report", "left", "quiet"]), st.integers(0, 2000)), max_size=60
)


@given(events=events)
def test_any_order_of_events_keeps_the_bounds(events: list[tuple[str, str, int]]) -> None:
    state, now, last = CoordinatorState(now=0.0), 0.0, 0.0
    last_report: dict[str, float] = {}
    for member, event, after_ms in events:
        now += after_ms / 1024  # exact in binary, so that the bounds are too
        if event == "report":
            state.on_report(make_report(member, waiting=after_ms), now)
            last_report[member] = now
        elif event == "left":
            state.on_left(member)
            last_report.pop(member, None)
        publish = state.on_timer(now)
        state.check_invariants()
        last_report = {name: at for name, at in last_report.items() if now - at < MEMBER_TIMEOUT_S}
        assert set(state.members) == set(last_report)
        if publish is not None:
            assert now - last >= MIN_PUBLISH_INTERVAL_S
            last = now
        assert not last_report or now - last < MAX_PUBLISH_INTERVAL_S
        assert 0.0 <= state.wait_s(now) <= MAX_PUBLISH_INTERVAL_S

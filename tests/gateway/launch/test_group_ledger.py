from __future__ import annotations

from collections.abc import Iterator

import pytest

from cores.messages import RankId
from gateway.launch.group_ledger import GivenUp, GroupLedger, OrderError, Removed, Restart, StartFailed


class Group:
    """A ledger with shorthands; its invariants are checked after every test."""

    def __init__(self, num_ranks: int, max_restarts: int) -> None:
        self.ledger = GroupLedger(range(num_ranks), max_restarts)

    def bring_up(self) -> list[RankId]:
        ids = [self.ledger.begin(record.rank) for record in self.ledger.snapshot().ranks]
        for rank_id in ids:
            self.ledger.on_ready(rank_id)
        return ids

    def state(self, rank: int) -> str:
        return self.ledger.snapshot().ranks[rank].state


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(2, max_restarts=2)
    yield group
    group.ledger.check_invariants()


def test_group_is_up_once_every_rank_is_ready(group: Group) -> None:
    first, second = group.ledger.begin(0), group.ledger.begin(1)
    assert (group.state(0), group.state(1)) == ("starting", "starting")
    assert group.ledger.on_ready(first)
    assert not group.ledger.was_up
    assert group.ledger.on_ready(second)
    assert group.ledger.was_up


def test_second_ready_message_is_no_news(group: Group) -> None:
    first = group.ledger.begin(0)
    assert group.ledger.on_ready(first)
    assert not group.ledger.on_ready(first)


def test_death_before_the_group_was_up_fails_the_start_with_its_cause(group: Group) -> None:
    group.ledger.begin(0)
    second = group.ledger.begin(1)
    assert group.ledger.on_death(second, "no memory", now=0.0) == StartFailed()
    assert group.ledger.snapshot().failed == "rank 1 did not start: no memory"


def test_dead_rank_is_restarted_with_the_next_epoch_and_later_each_time(group: Group) -> None:
    _, second = group.bring_up()
    assert group.ledger.on_death(second, "killed", now=10.0) == Restart(1.0)
    record = group.ledger.snapshot().ranks[1]
    assert (record.state, record.cause, record.restarts, record.restart_pending) == ("dead", "killed", 1, True)

    third = group.ledger.begin(1)
    assert third == RankId(1, 2)
    assert group.state(1) == "restarting"
    assert group.ledger.on_death(third, "again", now=12.0) == Restart(2.0)


def test_rank_is_given_up_after_its_restarts_and_the_others_go_on(group: Group) -> None:
    _, rank_id = group.bring_up()
    for now in (1.0, 2.0):
        group.ledger.on_death(rank_id, "killed", now)
        rank_id = group.ledger.begin(1)
        group.ledger.on_ready(rank_id)
    assert group.ledger.on_death(rank_id, "killed", now=3.0) == GivenUp()
    assert group.state(0) == "ready"
    assert group.ledger.failed is None


def test_restarts_older_than_ten_minutes_do_not_count(group: Group) -> None:
    _, rank_id = group.bring_up()
    for now in (0.0, 1.0):
        group.ledger.on_death(rank_id, "killed", now)
        rank_id = group.ledger.begin(1)
    assert group.ledger.on_death(rank_id, "killed", now=600.5) == Restart(2.0)
    assert group.ledger.snapshot().ranks[1].restarts == 3


def test_last_death_without_a_restart_fails_the_group() -> None:
    group = Group(2, max_restarts=0)
    first, second = group.bring_up()
    assert group.ledger.on_death(first, "one", now=0.0) == GivenUp()
    assert group.ledger.failed is None
    assert group.ledger.on_death(second, "two", now=0.0) == GivenUp()
    assert group.ledger.failed == "no rank is left; rank 1 was the last to die: two"
    group.ledger.check_invariants()


def test_rank_that_awaits_its_restart_keeps_the_group_alive() -> None:
    group = Group(2, max_restarts=1)
    first, second = group.bring_up()
    assert group.ledger.on_death(first, "one", now=0.0) == Restart(1.0)
    assert group.ledger.on_death(second, "two", now=0.0) == Restart(1.0)
    third = group.ledger.begin(0)
    assert group.ledger.on_death(third, "three", now=2.0) == GivenUp()
    assert group.ledger.failed is None
    group.ledger.check_invariants()


def test_only_the_first_proof_of_a_death_counts(group: Group) -> None:
    first, _ = group.bring_up()
    assert group.ledger.on_death(first, "killed", now=0.0) is not None
    assert group.ledger.on_death(first, "socket closed", now=0.1) is None
    assert group.ledger.snapshot().ranks[0].cause == "killed"


def test_news_of_an_older_life_is_ignored(group: Group) -> None:
    first, _ = group.bring_up()
    group.ledger.on_death(first, "killed", now=0.0)
    second = group.ledger.begin(0)
    assert not group.ledger.on_ready(first)
    assert group.ledger.on_death(first, "late news", now=1.0) is None
    assert group.state(0) == "restarting"
    assert group.ledger.on_ready(second)


def test_nobody_is_restarted_once_the_group_is_retired(group: Group) -> None:
    first, second = group.bring_up()
    group.ledger.on_death(first, "killed", now=0.0)
    group.ledger.retire()
    assert not group.ledger.snapshot().ranks[0].restart_pending
    assert group.ledger.on_death(second, "", now=0.0) == GivenUp()


def test_the_process_of_a_life_is_shown(group: Group) -> None:
    group.ledger.on_process(group.ledger.begin(0), 42)
    assert [record.pid for record in group.ledger.snapshot().ranks] == [42, None]


def test_a_rank_that_is_given_up_stays_dead_whatever_its_state(group: Group) -> None:
    group.bring_up()
    group.ledger.give_up(1, "nobody can watch it")
    row = group.ledger.snapshot().ranks[1]
    assert (row.state, row.cause, row.restart_pending) == ("dead", "nobody can watch it", False)
    assert group.ledger.failed is None
    group.ledger.give_up(0, "nor this one")
    assert group.ledger.failed == "no rank is left; rank 0 was the last to die: nor this one"


# --- orders of an operator ----------------------------------------------------------------------------------------------


def test_a_drained_rank_is_taken_back(group: Group) -> None:
    group.bring_up()
    for _ in range(2):  # the second changes nothing
        group.ledger.drain(1)
        assert group.state(1) == "draining"
    for _ in range(2):
        group.ledger.undrain(1)
        assert group.state(1) == "ready"


def test_an_ordered_restart_costs_nothing_of_what_a_rank_may_die(group: Group) -> None:
    group.bring_up()
    for epoch in range(1, 10):
        group.ledger.leave(0, "restart")
        assert group.ledger.snapshot().ranks[0].is_leaving
        assert group.ledger.on_death(RankId(0, epoch), "restarted by an operator", now=0.0) == Restart(0.0)
        assert group.ledger.on_ready(group.ledger.begin(0))
    assert not group.ledger.snapshot().ranks[0].is_leaving
    assert group.ledger.on_death(RankId(0, 10), "killed", now=0.0) == Restart(1.0)


def test_a_removed_rank_is_in_no_snapshot(group: Group) -> None:
    group.bring_up()
    group.ledger.leave(0, "remove")
    assert group.ledger.on_death(RankId(0, 1), "removed by an operator", now=0.0) == Removed()
    assert [record.rank for record in group.ledger.snapshot().ranks] == [1]
    assert group.ledger.on_death(RankId(0, 1), "late news", now=0.0) is None
    with pytest.raises(OrderError, match="rank 0 does not exist; the ranks are 1"):
        group.ledger.drain(0)


def test_an_added_rank_that_never_came_up_is_gone_and_one_that_did_is_a_rank_like_the_others(group: Group) -> None:
    group.bring_up()
    group.ledger.add(2)
    assert group.ledger.on_death(group.ledger.begin(2), "no memory", now=0.0) == Removed()
    group.ledger.add(2)
    second = group.ledger.begin(2)
    assert second == RankId(2, 2), "no frame of the first can pass for the second's"
    group.ledger.on_ready(second)
    assert group.ledger.on_death(second, "killed", now=0.0) == Restart(1.0)


def test_a_rank_that_was_given_up_can_be_revived_by_order() -> None:
    group = Group(2, max_restarts=0)
    group.bring_up()
    group.ledger.on_death(RankId(0, 1), "killed", now=0.0)
    assert group.ledger.is_down(0)
    group.ledger.revive(0)
    assert group.ledger.on_ready(group.ledger.begin(0))
    group.ledger.check_invariants()


@pytest.mark.parametrize("stays_up", [True, False])
def test_when_no_rank_is_left_an_order_brings_one_back_if_the_server_stays_up(stays_up: bool) -> None:
    ledger = GroupLedger([0], max_restarts=0, stays_up=stays_up)
    ledger.on_ready(ledger.begin(0))
    assert ledger.on_death(RankId(0, 1), "killed\nTraceback", now=0.0) == GivenUp()
    if stays_up:
        ledger.revive(0)
        assert ledger.snapshot().failed is None
        assert ledger.on_ready(ledger.begin(0))
        assert ledger.on_death(RankId(0, 2), "killed again", now=0.0) == GivenUp()
        ledger.add(1)
        assert ledger.snapshot().failed is None
        assert ledger.on_death(ledger.begin(1), "no memory", now=0.0) == Removed()
        assert ledger.failed == "no rank is left; rank 1 was added and did not start: no memory"
    else:
        for order in (ledger.revive, ledger.add):
            with pytest.raises(OrderError, match=r"has ended \(no rank is left; rank 0 was the last to die: killed\): start"):
                order(0 if order == ledger.revive else 1)
    ledger.check_invariants()


def test_a_start_that_failed_is_brought_back_by_no_order() -> None:
    ledger = GroupLedger([0], max_restarts=0, stays_up=True)
    ledger.on_death(ledger.begin(0), "no memory", now=0.0)
    with pytest.raises(OrderError, match="has ended"):
        ledger.revive(0)


def test_orders_that_do_not_fit_the_state_are_refused(group: Group) -> None:
    group.bring_up()
    group.ledger.leave(0, "restart")
    with pytest.raises(OrderError, match="rank 0 drains for its restart, which goes on"):
        group.ledger.undrain(0)
    with pytest.raises(OrderError, match="rank 0 drains already, for its restart"):
        group.ledger.leave(0, "remove")
    group.ledger.on_death(RankId(1, 1), "killed", now=0.0)
    with pytest.raises(OrderError, match="rank 1 is dead: only a rank that is ready can be drained"):
        group.ledger.drain(1)
    with pytest.raises(OrderError, match="rank 1 is dead: only a rank that drains can be taken back"):
        group.ledger.undrain(1)


def test_a_rank_that_gets_the_number_of_a_removed_one_counts_its_restarts_on(group: Group) -> None:
    group.bring_up()
    assert group.ledger.on_death(RankId(0, 1), "killed", now=0.0) == Restart(1.0)
    group.ledger.on_ready(group.ledger.begin(0))
    group.ledger.leave(0, "remove")
    assert group.ledger.on_death(RankId(0, 2), "removed by an operator", now=1.0) == Removed()
    group.ledger.add(0)
    assert [record.rank for record in group.ledger.snapshot().ranks] == [1]  # not as a life that is over
    group.ledger.begin(0)
    records = {record.rank: record for record in group.ledger.snapshot().ranks}
    assert (records[0].epoch, records[0].restarts) == (3, 1)


def test_a_rank_that_loses_node_after_node_is_never_given_up_and_its_own_deaths_still_count(group: Group) -> None:
    _, rank_id = group.bring_up()
    for now in range(10):
        assert group.ledger.on_death(rank_id, "its node is gone", float(now), is_node_lost=True) == Restart(1.0)
        assert group.ledger.snapshot().ranks[1].is_node_lost
        rank_id = group.ledger.begin(1)
        assert not group.ledger.snapshot().ranks[1].is_node_lost
        group.ledger.on_ready(rank_id)
    for verdict in (Restart(1.0), Restart(2.0)):
        assert group.ledger.on_death(rank_id, "killed", now=11.0) == verdict
        rank_id = group.ledger.begin(1)
    assert group.ledger.on_death(rank_id, "killed", now=12.0) == GivenUp()


def test_where_no_restart_is_wanted_a_lost_node_brings_none() -> None:
    group = Group(2, max_restarts=0)
    _, rank_id = group.bring_up()
    assert group.ledger.on_death(rank_id, "its node is gone", now=0.0, is_node_lost=True) == GivenUp()
    group.ledger.check_invariants()

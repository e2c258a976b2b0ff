"""Orders of an operator, from the message to the last process, over fake ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cores.control_messages import GroupOrder, GroupOrderDone
from cores.messages import RankId
from gateway.launch.group_operations import GroupOperations
from tests.gateway.launch.supervised_group import Group

NEVER_S = 1000.0


class Operated(Group):
    """A group and its operator."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.operations = GroupOperations(self.supervisor)

    def order(self, action: str, *, rank: int = 0, size: int = 0, timeout_s: float = NEVER_S) -> asyncio.Task[GroupOrderDone]:
        order = GroupOrder(1, action, rank, size, timeout_s)
        return asyncio.create_task(self.operations.carry_out(order))

    def ranks(self) -> dict[int, str]:
        return {record.rank: record.state for record in self.states[-1].ranks}

    async def answer(self, task: asyncio.Task[GroupOrderDone]) -> str | None:
        await self.until(task.done)
        return task.result().error

    async def come_up(self, rank: int, epoch: int = 1) -> None:
        await self.until(lambda: RankId(rank, epoch) in self.launcher.lives)
        self.say_ready(rank, epoch)


@pytest.fixture
async def group() -> AsyncIterator[Operated]:
    group = Operated(3)
    await group.bring_up()
    yield group
    await group.supervisor.stop(0.0)
    group.ledger.check_invariants()


async def test_a_restart_waits_for_the_requests_then_for_the_next_life(group: Operated) -> None:
    order = group.order("restart", rank=1)
    await group.until(lambda: group.ranks()[1] == "draining")
    assert not group.launcher.lives[RankId(1, 1)].was_killed
    group.supervisor.on_idle(0, RankId(1, 1))
    await group.come_up(1, epoch=2)
    assert await group.answer(order) is None
    assert group.launcher.lives[RankId(1, 1)].was_killed
    assert group.ranks() == {0: "ready", 1: "ready", 2: "ready"}
    assert group.sleeps == [0.0], "no backoff after an end that was ordered"


async def test_a_restart_does_not_wait_longer_than_it_may(group: Operated) -> None:
    order = group.order("restart", rank=1, timeout_s=0.0)
    await group.come_up(1, epoch=2)
    assert await group.answer(order) is None


async def test_a_rank_that_does_not_come_back_is_said_to_whoever_ordered_it(group: Operated) -> None:
    order = group.order("restart", rank=1, timeout_s=0.0)
    await group.until(lambda: RankId(1, 2) in group.launcher.lives)
    group.launcher.lives[RankId(1, 2)].end("no memory")
    assert "rank 1 ended and did not come back: no memory" in str(await group.answer(order))


async def test_a_rank_that_dies_while_it_drains_is_restarted_as_ordered(group: Operated) -> None:
    order = group.order("restart", rank=1)
    await group.until(lambda: group.ranks()[1] == "draining")
    group.launcher.lives[RankId(1, 1)].end("killed by signal 9")
    await group.come_up(1, epoch=2)
    assert await group.answer(order) is None


async def test_a_restart_does_not_wait_for_the_backoff_of_a_rank_that_has_died(group: Operated) -> None:
    group.may_wake.clear()
    group.launcher.lives[RankId(1, 1)].end("killed by signal 9")
    await group.until(lambda: group.sleeps == [1.0])
    order = group.order("restart", rank=1)
    await group.come_up(1, epoch=2)
    assert await group.answer(order) is None
    assert group.ranks() == {0: "ready", 1: "ready", 2: "ready"}


async def test_a_restart_of_a_rank_that_is_restarting_waits_until_it_is_ready(group: Operated) -> None:
    group.launcher.lives[RankId(1, 1)].end("killed by signal 9")
    await group.until(lambda: group.ranks()[1] == "restarting")
    order = group.order("restart", rank=1)
    await group.until(lambda: 1 in group.operations._busy)
    await group.come_up(1, epoch=2)
    assert await group.answer(order) is None
    assert RankId(1, 3) not in group.launcher.lives


async def test_a_second_order_for_a_rank_waits_its_turn_by_being_refused(group: Operated) -> None:
    first = group.order("restart", rank=1)
    await group.until(lambda: group.ranks()[1] == "draining")
    assert await group.answer(group.order("restart", rank=1)) == "rank 1 is being restarted"
    assert await group.answer(group.order("scale", size=1)) == "rank 1 is being restarted"
    group.supervisor.on_idle(0, RankId(1, 1))
    await group.come_up(1, epoch=2)
    assert await group.answer(first) is None


async def test_growing_takes_the_lowest_free_numbers_and_shrinking_the_drained_ranks_first(group: Operated) -> None:
    assert await group.answer(group.order("drain", rank=0)) is None
    shrink = group.order("scale", size=2)
    await group.until(lambda: group.states[-1].ranks[0].is_leaving)
    group.supervisor.on_idle(0, RankId(0, 1))
    assert await group.answer(shrink) is None
    assert group.ranks() == {1: "ready", 2: "ready"}
    grow = group.order("scale", size=4)
    await group.come_up(0, epoch=2)  # what its predecessor may still say is not taken for its own
    await group.come_up(3)
    assert await group.answer(grow) is None
    assert sorted(group.ranks()) == [0, 1, 2, 3]


async def test_growing_is_all_or_nothing(group: Operated) -> None:
    grow = group.order("scale", size=5)
    await group.come_up(3)
    await group.until(lambda: RankId(4, 1) in group.launcher.lives)
    group.launcher.lives[RankId(4, 1)].end("no memory")
    assert await group.answer(grow) == "rank 4 did not start: no memory"
    assert sorted(group.ranks()) == [0, 1, 2]
    assert group.launcher.lives[RankId(3, 1)].was_killed


async def test_an_error_of_ours_is_an_answer_and_leaves_no_rank_behind(group: Operated) -> None:
    group.ledger.bug = RuntimeError("a bug")
    assert await group.answer(group.order("scale", size=4)) == "rank 3 did not start: a bug"
    assert sorted(group.ranks()) == [0, 1, 2]
    group.ledger.bug = None
    grow = group.order("scale", size=4)
    await group.come_up(3, epoch=2)
    assert await group.answer(grow) is None


async def test_an_order_that_meets_a_bug_is_answered(group: Operated) -> None:
    group.supervisor._lives.clear()  # as no code of ours should leave it
    order = group.order("restart", rank=1)
    assert await group.answer(order) == "restart rank 1: KeyError: 1"
    assert order.result().error_kind == "failed"


async def test_a_restart_revives_a_rank_that_was_given_up() -> None:
    group = Operated(2)
    group.ledger = group.supervisor.ledger
    await group.bring_up()
    group.ledger.give_up(1, "for a reason of ours")
    group.launcher.lives[RankId(1, 1)].end("killed")
    await group.until(lambda: group.ledger.is_down(1))
    order = group.order("restart", rank=1)
    await group.come_up(1, epoch=2)
    assert await group.answer(order) is None
    await group.supervisor.stop(0.0)


@pytest.mark.parametrize(
    ("order", "kind", "message"),
    [
        ({"action": "drain", "rank": 7}, "unknown rank", "rank 7 does not exist; the ranks are 0, 1, 2"),
        ({"action": "explode"}, "conflict", "unknown order 'explode'"),
        ({"action": "restart", "rank": 7}, "unknown rank", "rank 7 does not exist"),
    ],
)
async def test_what_cannot_be_done_is_answered(group: Operated, order: dict[str, object], kind: str, message: str) -> None:
    task = group.order(**order)  # type: ignore[arg-type]
    assert message in str(await group.answer(task))
    assert task.result().error_kind == kind

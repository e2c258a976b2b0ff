"""What a front end makes of an operator's orders: ranks that drain, end by order, come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from balancer.ledger import LoadLedger
from cores.config import EngineConfig
from cores.control_messages import GroupOrder, GroupOrderDone, GroupState, RankDied, RankIdle, RankRecord
from cores.messages import AddRequest, EngineState, Heartbeat, RankId, RankLoad, SchedulerStats
from gateway.config import GatewayConfig, ParallelConfig
from gateway.core_client.base import EngineDied
from gateway.core_client.ranks import Ranks
from gateway.errors import EngineDeadError, InvalidRequestError
from gateway.event_log import SharedEventLog
from gateway.launch.group_ledger import GroupLedger
from tests.gateway.core_client.fake_group import FakeEngine, FakeGroup

ZERO, ONE, TWO = RankId(0, 1), RankId(1, 1), RankId(2, 1)
READY = (RankRecord(0, 1, "ready"), RankRecord(1, 1, "ready"))


def kinds(group: FakeGroup, rank: int) -> list[str]:
    return [event.kind for event in group.client.events.events(0.0) if event.rank == rank]


def idle_words(group: FakeGroup) -> list[RankIdle]:
    return [message for message in group.said if isinstance(message, RankIdle)]


async def test_a_draining_rank_gets_nothing_and_its_idleness_is_said_once_its_last_request_ends(group: FakeGroup) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    draining, taken_back = RankRecord(0, 1, "draining", num_drain_orders=1), RankRecord(0, 1, "ready", num_drain_orders=2)
    group.tell_state(draining, READY[1])
    await group.until(lambda: group.state(0) == "draining")
    assert [group.add_request()[1] for _ in range(4)] == [ONE] * 4
    assert idle_words(group) == []
    group.client.release([handle])
    await group.until(lambda: idle_words(group))
    group.tell_state(draining, READY[1])
    group.tell_state(taken_back, READY[1])
    await group.until(lambda: group.state(0) == "ready")
    assert idle_words(group) == [RankIdle(0, ZERO)]
    assert kinds(group, 0) == ["ready", "drain", "drain"]
    assert [event.text for event in group.client.events.events(group.clock())][-1] == "epoch 1 gets new requests again"


async def test_a_drain_is_one_event_however_often_it_is_told_and_whatever_we_think_of_the_rank(group: FakeGroup) -> None:
    draining = RankRecord(2, 1, "draining", num_drain_orders=1)
    for _ in range(3):  # it has not yet connected to us: to a front end that has started again, say
        group.tell_state(*READY, draining)
    await group.until(lambda: len(group.client.rank_statuses(0.0)) == 3)
    await group.begin_life(TWO)
    await group.until(lambda: group.state(2) == "draining")
    told = (("draining", 1), ("draining", 1), ("ready", 2), ("ready", 2), ("draining", 3))
    for num_seen, (state, num_orders) in enumerate(told):
        group.tell_state(*READY, RankRecord(2, 1, state, restarts=num_seen, num_drain_orders=num_orders))
        await group.until(lambda n=num_seen: group.client.rank_statuses(0.0)[2].restarts == n)
    texts = [event.text for event in group.client.events.events(0.0) if event.rank == 2 and event.kind == "drain"]
    no_more, again = "epoch 1 gets no new requests", "epoch 1 gets new requests again"
    assert texts == [no_more, again, no_more]


def start_front_end(directory: Path, num_ranks: int = 1) -> Ranks:
    """One of several that share an event log, or one that starts again."""

    def ignore(*_: object) -> None: ...

    config = GatewayConfig(engine=EngineConfig(model="m"), parallel=ParallelConfig(data_parallel_size=num_ranks))
    return Ranks(
        config, 0, 1, LoadLedger(), lambda: 0.0, events=SharedEventLog(directory / "events"),
        put=ignore, tell_launcher=ignore, read_all=lambda: None, on_serving=ignore,
    )  # fmt: skip


async def test_a_drain_after_a_front_end_has_started_again_is_told_and_the_one_before_it_once(tmp_path: Path) -> None:
    launcher = GroupLedger([0], max_restarts=3)
    launcher.on_ready(launcher.begin(0))
    front_end = start_front_end(tmp_path)
    orders = [launcher.drain, launcher.undrain, launcher.drain]
    for order in orders:
        order(0)
        front_end.on_group_state(launcher.snapshot())
        front_end = start_front_end(tmp_path)
        front_end.on_group_state(launcher.snapshot())
    texts = [event.text for event in front_end.events.events(0.0) if event.kind == "drain"]
    no_more, again = "epoch 1 gets no new requests", "epoch 1 gets new requests again"
    assert texts == [no_more, again, no_more]


async def test_a_refusal_names_the_command_that_takes_drained_ranks_back_and_only_where_it_helps(group: FakeGroup) -> None:
    group.tell_state(RankRecord(0, 1, "draining", num_drain_orders=1), READY[1])
    await group.until(lambda: group.state(0) == "draining")
    assert group.client.standstill is None
    group.tell_state(RankRecord(0, 1, "draining", num_drain_orders=1), RankRecord(1, 1, "draining", num_drain_orders=1))
    await group.until(lambda: group.client.standstill == "draining")
    assert group.client.standstill_cause == "an operator has drained its ranks; `gateway ranks undrain all` takes them back"
    group.tell_state(RankRecord(0, 1, "draining", num_drain_orders=1), RankRecord(1, 1, "dead", "killed"))
    await group.until(lambda: group.state(1) == "dead")
    assert "`gateway ranks undrain 0` takes" in group.client.standstill_cause
    group.client.ranks.lives[0].health.on_engine_state(EngineState.DRAINING, group.clock())  # before a pause
    assert group.client.standstill_cause == "it is draining"


async def test_an_end_by_order_is_no_death_and_blames_no_request(group: FakeGroup) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    group.tell_state(RankRecord(0, 1, "draining", is_leaving=True, num_drain_orders=1), READY[1])
    group.tell_state(RankRecord(0, 1, "dead", "restarted by an operator", restart_pending=True), READY[1])
    died = await group.received()
    assert died == EngineDied(ZERO, "restarted by an operator", is_blameless=True)
    assert [sent.request.handle for sent in group.client.on_engine_died(died)] == [handle]
    status = group.client.rank_statuses(group.clock())[0]
    assert (status.state, status.deaths, status.death_cause) == ("dead", 0, None)
    assert kinds(group, 0) == ["ready", "drain", "drain"]


async def test_requests_that_have_found_no_rank_yet_are_not_said_to_go_on_elsewhere(group: FakeGroup) -> None:
    group.client.ranks.note_moved(EngineDied(ZERO, "killed"), num_moved=3, num_lost=1, num_waiting=1)
    texts = [event.text for event in group.client.events.events(group.clock()) if event.kind == "move"]
    assert texts == [
        "2 requests of epoch 1 went on elsewhere",
        "1 request of epoch 1 failed",
        "1 request of epoch 1 had to wait for a rank",
    ]


async def test_a_group_of_which_no_rank_was_left_serves_again_when_an_order_has_brought_one_back(group: FakeGroup) -> None:
    dead = tuple(RankRecord(rank, 1, "dead", "killed") for rank in (0, 1))
    group.tell(GroupState(dead, "no rank is left"))
    await group.until(lambda: group.client.failure == "no rank is left")
    with pytest.raises(EngineDeadError, match="no rank is left"):
        group.add_request()
    group.tell(GroupState((RankRecord(0, 2, "restarting"), dead[1])))
    await group.until(lambda: group.client.failure is None)
    assert group.client.awaits_restart
    await group.begin_life(RankId(0, 2))
    await group.until(lambda: group.state(0) == "ready")
    assert group.add_request()[1] == RankId(0, 2)


async def test_a_failure_of_our_own_is_not_taken_back_by_the_launchers_next_word(group: FakeGroup) -> None:
    group.client.ranks.fail("the launcher ended")
    group.tell_state(*READY)
    group.tell(GroupOrderDone(1))
    group.tell_state(*READY, RankRecord(2, 1, "starting"))
    await group.until(lambda: len(group.client.rank_statuses(0.0)) == 3)
    assert group.client.failure == "the launcher ended"


async def test_a_death_with_its_node_is_a_death_and_blames_no_request(group: FakeGroup) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    group.tell_state(RankRecord(0, 1, "dead", "its node is gone", restart_pending=True, is_node_lost=True), READY[1])
    died = await group.received()
    assert died == EngineDied(ZERO, "its node is gone", is_blameless=True)
    assert [sent.request.handle for sent in group.client.on_engine_died(died)] == [handle]
    status = group.client.rank_statuses(group.clock())[0]
    assert (status.state, status.deaths, status.death_cause) == ("dead", 1, "its node is gone")


async def test_an_added_rank_takes_requests_and_a_removed_one_is_gone_with_what_it_held(group: FakeGroup) -> None:
    group.tell_state(*READY, RankRecord(2, 1, "starting"))
    await group.until(lambda: len(group.client.rank_statuses(0.0)) == 3)
    await group.begin_life(TWO)
    await group.until(lambda: group.state(2) == "ready")
    handle, rank_id = group.add_request(pinned_rank=2)
    assert rank_id == TWO
    group.tell_state(*READY)
    died = await group.received()
    assert died == EngineDied(TWO, "removed by an operator", is_blameless=True)
    assert [status.rank for status in group.client.rank_statuses(0.0)] == [0, 1]
    group.client.abort_requests([handle])  # its rank is gone, and with it what was to be aborted
    group.client.ranks.note_moved(died, 0, 0)
    assert group.client.on_engine_died(died) == []
    assert [message for message in group.said if isinstance(message, RankDied)] == []


async def test_a_change_of_the_number_of_ranks_is_one_event_however_many_front_ends_there_are_and_no_news_to_one_that_restarts(
    tmp_path: Path,
) -> None:
    launcher = GroupLedger([0, 1], max_restarts=3)
    for rank in (0, 1):
        launcher.on_ready(launcher.begin(rank))
    front_ends = [start_front_end(tmp_path, num_ranks=2) for _ in range(2)]

    def tell() -> None:
        for front_end in front_ends:
            front_end.on_group_state(launcher.snapshot())

    tell()
    launcher.add(2)
    launcher.on_ready(launcher.begin(2))
    tell()
    front_ends[1] = start_front_end(tmp_path, num_ranks=2)
    launcher.leave(2, "remove")
    launcher.on_death(TWO, "removed by an operator", 0.0)
    tell()
    front_ends[1] = start_front_end(tmp_path, num_ranks=2)
    tell()
    launcher.add(2)
    tell()
    launcher.begin(2)
    tell()
    events = [(event.kind, event.rank, event.text) for event in front_ends[1].events.events(0.0)]
    assert events == [
        ("scale", 2, "added"),
        ("drain", 2, "epoch 1 ended with 0 requests in flight: removed by an operator"),
        ("scale", 2, "removed"),
        ("scale", 2, "added"),
    ]


async def test_a_rank_that_gets_the_number_of_a_removed_one_counts_on(group: FakeGroup) -> None:
    for epoch in (1, 2):
        group.tell_state(*READY, RankRecord(2, epoch, "starting"))
        await group.until(lambda: len(group.client.rank_statuses(0.0)) == 3)
        engine = await group.begin_life(RankId(2, epoch))
        await group.until(lambda: group.state(2) == "ready")
        await engine.say(Heartbeat(RankId(2, epoch), 1, False, 0, RankLoad(), SchedulerStats(num_generation_tokens=10)))
        await group.until(lambda total=10 * epoch: group.client.rank_statuses(0.0)[2].generation_tokens == total)
        group.tell_state(*READY)
        await group.until(lambda: len(group.client.rank_statuses(0.0)) == 2)


async def test_the_first_word_of_an_added_rank_is_kept_if_it_comes_before_the_launchers(group: FakeGroup) -> None:
    engine: FakeEngine = await group.begin_life(TWO)
    group.tell_state(*READY)  # of before it was added
    assert group.add_request(pinned_rank=0)[1] == ZERO
    assert isinstance(await group.engines[0].command(), AddRequest)
    group.tell_state(*READY, RankRecord(2, 1, "starting"))
    await group.until(lambda: len(group.client.rank_statuses(0.0)) == 3 and group.state(2) == "ready")
    assert group.add_request(pinned_rank=2)[1] == engine.rank_id


@pytest.mark.parametrize(
    ("answer", "error", "status"),
    [
        (GroupOrderDone(1), None, None),
        (GroupOrderDone(1, "rank 9 does not exist", "unknown rank"), InvalidRequestError, 404),
        (GroupOrderDone(1, "rank 0 is being restarted", "conflict"), InvalidRequestError, 409),
        (GroupOrderDone(1, "rank 0 ended and did not come back", "failed"), EngineDeadError, None),
    ],
)
async def test_an_order_is_answered_by_the_launcher(
    group: FakeGroup, answer: GroupOrderDone, error: type[Exception] | None, status: int | None
) -> None:
    ordering = asyncio.create_task(group.client.order("restart", rank=9, drain_timeout_s=1.5))
    await group.until(lambda: GroupOrder(1, "restart", rank=9, drain_timeout_s=1.5) in group.said)
    group.tell(GroupOrderDone(77))  # to an order whose caller has left
    group.tell(answer)
    if error is None:
        await ordering
        return
    with pytest.raises(error, match=str(answer.error)) as caught:
        await ordering
    if status is not None:
        assert isinstance(caught.value, InvalidRequestError)
        assert caught.value.status == status


async def test_an_order_is_done_when_this_front_end_has_heard_the_rank_itself(group: FakeGroup) -> None:
    ordering = asyncio.create_task(group.client.order("restart", rank=0))
    await group.until(lambda: any(isinstance(message, GroupOrder) for message in group.said))
    group.tell_state(RankRecord(0, 2, "ready"), READY[1])
    group.tell(GroupOrderDone(1))
    await group.until(lambda: group.state(0) == "starting")
    await group.until(lambda: not group.client._orders._open)  # the launcher's answer is here
    assert not ordering.done()
    await group.begin_life(RankId(0, 2))
    await ordering
    assert group.state(0) == "ready"


async def test_an_order_is_done_when_the_rank_that_is_waited_for_has_died(group: FakeGroup) -> None:
    ordering = asyncio.create_task(group.client.order("restart", rank=0))
    await group.until(lambda: any(isinstance(message, GroupOrder) for message in group.said))
    group.tell_state(RankRecord(0, 2, "ready"), READY[1])
    group.tell(GroupOrderDone(1))
    group.tell_state(RankRecord(0, 2, "dead", "no memory"), READY[1])
    await ordering
    assert group.state(0) == "dead"


async def test_an_order_under_way_ends_with_the_client(group: FakeGroup) -> None:
    ordering = asyncio.create_task(group.client.order("drain", rank=0))
    await group.until(lambda: any(isinstance(message, GroupOrder) for message in group.said))
    await group.client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await ordering

"""The lives of ranks: starts, deaths, restarts, lost nodes, and errors of the supervisor itself, over fake ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cores.config import FrontEndAddress
from cores.control_messages import EngineAlive, RankDied
from cores.messages import EngineCoreDead, RankId
from tests.gateway.launch.fake_ranks import FakeRank
from tests.gateway.launch.supervised_group import Group


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    group = Group(2)
    yield group
    await group.supervisor.stop(0.0)
    group.ledger.check_invariants()


async def test_all_ranks_start_at_once_and_the_group_is_up_when_all_are_ready(group: Group) -> None:
    group.start()
    await group.until(lambda: len(group.launcher.launches) == 2)
    group.say_ready(1)
    await group.until(lambda: group.state(1) == "ready")
    assert not group.supervisor.up.is_set()
    group.say_ready(0)
    await group.supervisor.up.wait()
    assert [(launch.rank, launch.epoch, launch.local_rank) for launch in group.launcher.launches] == [(0, 1, 0), (1, 1, 1)]


async def test_an_error_of_the_supervisor_costs_one_rank_and_not_the_server(group: Group) -> None:
    await group.bring_up()
    group.ledger.bug = RuntimeError("a bug")
    group.launcher.lives[RankId(1, 1)].end("killed by signal 9")
    await group.until(lambda: "cannot be supervised" in (group.states[-1].ranks[1].cause or ""))
    assert [group.state(0), group.state(1)] == ["ready", "dead"]
    assert not group.states[-1].ranks[1].restart_pending
    assert group.failures == []


async def test_an_error_of_the_supervisor_during_the_start_ends_the_start(group: Group) -> None:
    group.ledger.bug = RuntimeError("a bug")
    group.start()
    await group.until(lambda: bool(group.failures))
    assert "did not start: it cannot be supervised any more: RuntimeError: a bug" in group.failures[0]


async def test_killed_rank_is_announced_dead_and_then_restarted_with_the_next_epoch(group: Group) -> None:
    await group.bring_up()
    group.launcher.lives[RankId(1, 1)].end("killed by signal 9")
    await group.until(lambda: RankId(1, 2) in group.launcher.lives)
    dead = next(state.ranks[1] for state in group.states if state.ranks[1].state == "dead")
    assert (dead.epoch, dead.cause, dead.restart_pending) == (1, "killed by signal 9", True)
    assert group.sleeps == [1.0]
    group.say_ready(1, epoch=2)
    await group.until(lambda: group.state(1) == "ready")
    assert group.failures == []


async def test_last_words_beat_the_exit_code_that_is_seen_first(group: Group) -> None:
    await group.bring_up()
    group.launcher.lives[RankId(0, 1)].end("exited with code 1", abrupt=False)
    await asyncio.sleep(0)
    group.supervisor.on_message(EngineCoreDead(RankId(0, 1), "out of memory"))
    await group.until(lambda: any(state.ranks[0].state == "dead" for state in group.states))
    assert group.states[-1].ranks[0].cause == "out of memory"


async def test_proof_of_a_front_end_counts_and_the_process_is_killed_before_its_successor_starts(group: Group) -> None:
    await group.bring_up()
    life = group.launcher.lives[RankId(0, 1)]
    group.supervisor.on_message(RankDied(RankId(0, 1), "it said so"))
    await group.until(lambda: group.state(0) == "dead")
    assert RankId(0, 2) not in group.launcher.lives
    life.end("gone")
    await group.until(lambda: RankId(0, 2) in group.launcher.lives)
    assert life.was_killed


async def test_a_rank_that_cannot_be_watched_any_more_is_dead_and_killed(group: Group) -> None:
    await group.bring_up()
    life = group.launcher.lives[RankId(0, 1)]
    life.lose(ConnectionError("the cluster is gone"))
    await group.until(lambda: RankId(0, 2) in group.launcher.lives)
    dead = next(state.ranks[0] for state in group.states if state.ranks[0].state == "dead")
    assert dead.cause == "its process cannot be watched any more: ConnectionError: the cluster is gone"
    assert life.was_killed


async def test_news_of_an_older_life_does_not_touch_the_present_one(group: Group) -> None:
    await group.bring_up()
    group.launcher.lives[RankId(0, 1)].end("killed")
    await group.until(lambda: RankId(0, 2) in group.launcher.lives)
    group.supervisor.on_message(EngineCoreDead(RankId(0, 1), "late"))
    group.say_ready(0, epoch=1)
    await asyncio.sleep(0)
    assert group.state(0) == "restarting"


async def test_death_while_starting_fails_the_start_with_its_cause(group: Group) -> None:
    group.start()
    await group.until(lambda: len(group.launcher.launches) == 2)
    group.supervisor.on_message(EngineCoreDead(RankId(1, 1), "no such file\nTraceback"))
    await group.until(lambda: bool(group.failures))
    assert group.failures == ["rank 1 did not start: no such file\nTraceback"]
    assert group.states[-1].failed == group.failures[0]
    assert group.sleeps == []


async def test_a_rank_whose_launcher_meets_an_error_of_any_kind_is_tried_again(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    await group.bring_up()
    group.launcher.refuse_with = OSError(24, "Too many open files")
    group.launcher.lives[RankId(1, 1)].end("killed by signal 9")
    await group.until(lambda: RankId(1, 3) in group.launcher.lives)
    refused = next(state.ranks[1] for state in group.states if (state.ranks[1].epoch, state.ranks[1].state) == (2, "dead"))
    assert refused.cause == "it could not be started: OSError: [Errno 24] Too many open files"
    assert refused.restart_pending
    assert any(record.exc_info for record in caplog.records)
    group.say_ready(1, epoch=3)
    await group.until(lambda: group.state(1) == "ready")
    assert group.failures == []


async def test_rank_that_cannot_be_launched_fails_the_start(group: Group) -> None:
    group.launcher.refusal = "no GPU"
    group.start()
    await group.until(lambda: bool(group.failures))
    assert group.failures[0] == "rank 0 did not start: no GPU"


async def test_rank_that_is_not_ready_in_time_is_dead() -> None:
    group = Group(1, ready_timeout_s=0.01)
    group.start()
    async with asyncio.timeout(10):
        while not group.failures:
            await asyncio.sleep(0)
            for life in group.launcher.lives.values():
                if group.states[-1].failed:
                    life.end("killed")
    assert group.failures == ["rank 0 did not start: rank 0 (epoch 1) was not ready within 0.01 s"]
    await group.supervisor.stop(0.0)


async def test_last_rank_without_restarts_fails_the_group_once() -> None:
    group = Group(2, max_restarts=0)
    await group.bring_up()
    group.launcher.lives[RankId(0, 1)].end("one")
    await group.until(lambda: group.state(0) == "dead")
    assert group.failures == []
    group.launcher.lives[RankId(1, 1)].end("two")
    await group.until(lambda: bool(group.failures))
    assert group.failures == ["no rank is left; rank 1 was the last to die: two"]
    await group.supervisor.stop(0.0)


async def test_restarted_rank_is_told_of_the_present_front_end(group: Group) -> None:
    await group.bring_up()
    successor = FrontEndAddress(index=0, input_address="ipc://in2", output_address="ipc://out2")
    group.supervisor.replace_front_end(successor)
    group.launcher.lives[RankId(0, 1)].end("killed")
    await group.until(lambda: RankId(0, 2) in group.launcher.lives)
    assert group.launcher.launches[-1].front_ends == (successor,)


async def test_living_rank_is_told_of_a_front_ends_next_life_once_and_again_if_it_did_not_hear(group: Group) -> None:
    await group.bring_up()
    told: list[FrontEndAddress] = []

    def hear(address: FrontEndAddress) -> bool:
        told.append(address)
        return True

    rank_id = RankId(0, 1)
    group.supervisor.tell_of_front_ends(rank_id, hear)
    assert told == [], "it was launched with the present one"

    successor = FrontEndAddress(index=0, input_address="ipc://in2", output_address="ipc://out2")
    group.supervisor.replace_front_end(successor)
    group.supervisor.tell_of_front_ends(rank_id, lambda address: False)
    for _ in range(2):
        group.supervisor.tell_of_front_ends(rank_id, hear)
    assert told == [successor]
    group.supervisor.tell_of_front_ends(RankId(0, 7), hear)
    assert told == [successor], "nobody is told of another life"


async def test_stop_waits_for_ordered_ends_and_kills_the_rest(group: Group) -> None:
    await group.bring_up()
    orderly, stubborn = group.launcher.lives[RankId(0, 1)], group.launcher.lives[RankId(1, 1)]
    orderly.end("", abrupt=False)
    await group.supervisor.stop(0.01)
    assert stubborn.was_killed
    assert group.failures == []
    assert len(group.launcher.launches) == 2


def put_on(group: Group, node: str, *ranks: int, node_silent_s: float = 0.0, name: str | None = None) -> list[FakeRank]:
    lives = [group.launcher.lives[RankId(rank, 1)] for rank in ranks]
    for life in lives:
        life.node, life.node_id, life.node_silent_s = name or node, node, node_silent_s
    return lives


async def test_all_ranks_of_a_node_that_is_gone_are_declared_dead_in_one_snapshot() -> None:
    group = Group(4)
    await group.bring_up()
    put_on(group, "lost", 1, 2, 3, node_silent_s=60.0)
    num_states = len(group.states)
    group.supervisor.look_for_lost_nodes(group.clock() + 2.5)
    await group.until(lambda: len(group.states) > num_states)
    assert [record.state for record in group.states[num_states].ranks] == ["ready", "dead", "dead", "dead"]
    assert "node lost is gone: nothing was heard of it or its ranks for" in str(group.states[-1].ranks[1].cause)
    await group.until(lambda: all(RankId(rank, 2) in group.launcher.lives for rank in (1, 2, 3)))
    assert all(group.launcher.lives[RankId(rank, 1)].was_killed for rank in (1, 2, 3))
    await group.supervisor.stop(0.0)
    group.ledger.check_invariants()


async def test_lost_nodes_cost_a_rank_none_of_its_restarts() -> None:
    group = Group(2, max_restarts=1)
    await group.bring_up()
    for epoch in range(1, 6):
        life = group.launcher.lives[RankId(1, epoch)]
        life.node_id, life.node_silent_s = f"node {epoch}", 60.0
        group.supervisor.look_for_lost_nodes(group.clock() + 2.5)
        await group.until(lambda epoch=epoch: RankId(1, epoch + 1) in group.launcher.lives)  # type: ignore[misc]
        group.say_ready(1, epoch=epoch + 1)
    group.launcher.lives[RankId(1, 6)].end("Ray has ended its node", is_node_lost=True)
    await group.until(lambda: RankId(1, 7) in group.launcher.lives)
    assert group.sleeps == [1.0] * 6
    group.launcher.lives[RankId(1, 7)].end("killed by signal 9")
    await group.until(lambda: RankId(1, 8) in group.launcher.lives)
    lost = [record for state in group.states if (record := state.ranks[1]).state == "dead" and record.is_node_lost]
    assert {record.epoch for record in lost} == set(range(1, 7))
    group.launcher.lives[RankId(1, 8)].end("killed by signal 9")
    await group.until(lambda: group.states[-1].ranks[1].state == "dead" and not group.states[-1].ranks[1].restart_pending)
    await group.supervisor.stop(0.0)
    group.ledger.check_invariants()


async def test_a_lost_node_is_noticed_although_another_one_has_the_same_name(group: Group) -> None:
    await group.bring_up()
    put_on(group, "id-1", 0, node_silent_s=0.1, name="worker")
    put_on(group, "id-2", 1, node_silent_s=60.0, name="worker")
    num_states = len(group.states)
    group.supervisor.look_for_lost_nodes(group.clock() + 2.5)
    await group.until(lambda: len(group.states) > num_states)
    assert [record.state for record in group.states[num_states].ranks] == ["ready", "dead"]


async def test_a_silent_rank_on_a_node_that_answers_is_not_lost_and_neither_is_one_that_speaks_on_a_silent_node(
    group: Group,
) -> None:
    await group.bring_up()
    put_on(group, "busy", 0, node_silent_s=0.1)
    put_on(group, "silent", 1, node_silent_s=60.0)
    group.supervisor.on_message(EngineAlive(RankId(1, 1)))
    group.supervisor.look_for_lost_nodes(group.clock() + 1.5)
    for _ in range(10):
        await asyncio.sleep(0)
    assert [group.state(0), group.state(1)] == ["ready", "ready"]


async def test_a_rank_that_ray_has_lost_waits_for_the_verdict_on_its_node(group: Group) -> None:
    await group.bring_up()
    first, _ = put_on(group, "lost", 0, 1, node_silent_s=1.0)
    first.end("Ray has lost touch with it")
    for _ in range(10):
        await asyncio.sleep(0)
    assert [group.state(0), group.state(1)] == ["ready", "ready"]
    put_on(group, "lost", 0, 1, node_silent_s=60.0)
    num_states = len(group.states)
    group.supervisor.look_for_lost_nodes(group.clock() + 2.5)
    await group.until(lambda: len(group.states) > num_states)
    assert [record.state for record in group.states[num_states].ranks] == ["dead", "dead"]


async def test_a_rank_that_is_heard_again_after_its_end_is_one_line_however_much_it_says(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    for epoch in (1, 2):
        for _ in range(34):
            group.supervisor.note_revenant(RankId(0, epoch))
    assert [record.message for record in caplog.records] == [
        f"rank 0 (epoch {epoch}) was declared dead and speaks: told to end" for epoch in (1, 2)
    ]
    group.supervisor.retire()
    group.supervisor.note_revenant(RankId(0, 3))
    assert len(caplog.records) == 2


async def test_a_life_that_was_declared_dead_is_over_whatever_it_says(group: Group) -> None:
    await group.bring_up()
    assert not group.supervisor.is_over(RankId(0, 1))
    group.launcher.lives[RankId(0, 1)].end("killed")
    await group.until(lambda: RankId(0, 2) in group.launcher.lives)
    assert group.supervisor.is_over(RankId(0, 1))
    assert not group.supervisor.is_over(RankId(0, 2))
    assert group.supervisor.is_over(RankId(7, 1))

"""The core client against a launcher and engines that say exactly what the test wants, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from cores.control_messages import RankDied, RankRecord, RankStalled, RankSuspected
from cores.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    EngineCoreOutputs,
    Heartbeat,
    RankId,
    RankLoad,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
)
from gateway.core_client.base import EngineDied, EngineFailed, RanksChanged
from gateway.errors import EngineDeadError, EngineGenerateError, InvalidRequestError, OverloadedError
from tests.gateway.core_client.fake_group import DEADLINE_S, FakeGroup

ZERO, ONE = RankId(0, 1), RankId(1, 1)


async def test_a_request_is_on_the_books_until_it_is_aborted_once_at_the_rank_that_holds_it(group: FakeGroup) -> None:
    handle, rank_id = group.add_request()
    engine = group.engines[rank_id.rank]
    sent = await engine.command()
    assert isinstance(sent, AddRequest)
    assert sent.request.handle == handle
    group.client.abort_requests([handle, handle, 999])
    assert await engine.command() == AbortRequests(sent.seq + 1, (handle, handle))
    assert group.client.ledger.num_in_flight == 0


async def test_an_aborted_request_is_no_load_any_more_whatever_the_last_report_says(group: FakeGroup) -> None:
    handle, rank_id = group.add_request()
    engine = group.engines[rank_id.rank]
    sent = await engine.command()
    assert isinstance(sent, AddRequest)
    await engine.say(group.outputs(rank_id, 0, handle, command_seq=sent.seq))
    await group.received()
    view = group.client.ledger.view(rank_id)
    assert (view.num_requests, view.num_decodes) == (1, 1)
    group.client.abort_requests([handle])
    view = group.client.ledger.view(rank_id)
    assert (view.num_requests, view.num_decodes) == (0, 0)


async def test_a_silent_rank_leaves_rotation_and_comes_back_with_its_next_word(group: FakeGroup) -> None:
    group.clock.sleep(3.5)
    alive = Heartbeat(ZERO, 1, False, 0, RankLoad(), SchedulerStats())
    await group.engines[0].say(alive)
    await group.until(lambda: (group.state(0), group.state(1)) == ("ready", "suspect"))
    await group.until(lambda: any(isinstance(m, RankSuspected) and m.rank_id == ONE for m in group.said))
    assert {group.add_request()[1] for _ in range(4)} == {ZERO}
    with pytest.raises(OverloadedError):
        group.add_request(pinned_rank=1)
    await group.engines[1].say(Heartbeat(ONE, 1, False, 0, RankLoad(), SchedulerStats()))
    await group.until(lambda: group.state(1) == "ready")
    assert group.add_request(pinned_rank=1)[1] == ONE


async def test_a_load_is_as_old_as_the_step_behind_it_however_new_the_heartbeat(group: FakeGroup) -> None:
    alive = Heartbeat(ZERO, 1, True, 0, RankLoad(num_running=7), SchedulerStats(), load_age_s=2.5)
    await group.engines[0].say(alive)
    await group.until(lambda: group.client.rank_statuses(group.clock())[0].running == 7)
    group.clock.sleep(0.25)
    assert group.client.rank_statuses(group.clock())[0].signal_age_ms == 2750.0


async def test_where_all_ranks_are_silent_requests_still_go_to_them_as_health_says(group: FakeGroup) -> None:
    group.clock.sleep(3.5)
    await group.until(lambda: (group.state(0), group.state(1)) == ("suspect", "suspect"))
    assert {group.add_request()[1] for _ in range(4)} == {ZERO, ONE}


async def test_tokens_that_came_before_the_launchers_verdict_are_delivered_before_the_death(group: FakeGroup) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    for step in range(5):
        await group.engines[0].say(group.outputs(ZERO, step, handle))
    await group.until(lambda: group.client.rank_statuses(group.clock())[0].running)
    group.tell_state(RankRecord(0, 1, "dead", "killed"), RankRecord(1, 1, "ready"))
    for step in range(5):
        message = await group.received()
        assert isinstance(message, EngineCoreOutputs)
        assert message.step == step
    died = await group.received()
    assert died == EngineDied(ZERO, "killed")
    assert [sent.request.handle for sent in group.client.on_engine_died(died)] == [handle]
    assert group.client.ledger.num_in_flight == 0


async def test_a_connection_that_broke_with_tokens_in_it_ends_that_life_before_the_next_token_is_delivered(
    group: FakeGroup,
) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    await group.engines[0].say(group.outputs(ZERO, 1, handle))
    group.engines[0].lose(2)
    await group.engines[0].say(group.outputs(ZERO, 4, handle))
    assert isinstance(await group.received(), EngineCoreOutputs)
    died = await group.received()
    assert died == EngineDied(ZERO, "2 messages of it got lost: its connection broke")
    await group.until(lambda: RankDied(ZERO, died.cause) in group.said)
    assert [sent.request.handle for sent in group.client.on_engine_died(died)] == [handle]
    assert group.client.num_stale_frames == 1


async def test_a_rank_that_can_be_sent_nothing_gets_no_more_requests_and_is_dead_after_a_second_although_it_speaks(
    group: FakeGroup,
) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    group.engines[0].lose_commands()
    await group.until(lambda: cannot_be_sent(group, 0))
    assert {group.add_request()[1] for _ in range(4)} == {ONE}
    assert group.state(0) == "ready"
    group.clock.sleep(1.5)
    await group.engines[0].say(group.outputs(ZERO, 1, handle))
    died = await group.received()
    while isinstance(died, EngineCoreOutputs | RanksChanged):
        died = await group.received()
    assert died == EngineDied(ZERO, "it cannot be reached: its connection broke")
    await group.until(lambda: RankDied(ZERO, died.cause) in group.said)
    assert handle in [sent.request.handle for sent in group.client.on_engine_died(died)]


def cannot_be_sent(group: FakeGroup, rank: int) -> bool:
    try:
        group.client.release([group.add_request(pinned_rank=rank)[0]])
    except EngineDeadError:
        return True
    return False


async def test_a_command_that_nothing_follows_and_the_rank_has_not_seen_is_followed_by_one_that_asks_for_nothing(
    group: FakeGroup,
) -> None:
    group.add_request(pinned_rank=0)
    command = await group.engines[0].command()
    assert isinstance(command, AddRequest)
    asked = asyncio.create_task(group.engines[0].command())

    def is_asked() -> bool:  # as if the request had got lost: no report tells of it
        group.clock.sleep(0.1)
        return asked.done()

    await group.until(is_asked)
    assert await asked == AbortRequests(command.seq + 1, ())


async def test_the_first_proof_of_a_death_counts_and_the_launcher_hears_of_it_once(group: FakeGroup) -> None:
    await group.engines[0].say(EngineCoreDead(ZERO, "out of memory\nTraceback"))
    assert await group.received() == EngineDied(ZERO, "out of memory")
    group.tell_state(RankRecord(0, 1, "dead", "exited with code 1", restart_pending=True), RankRecord(1, 1, "ready"))
    await group.engines[0].say(EngineCoreDead(ZERO, "again"))
    await group.until(lambda: group.client.num_stale_frames)
    status = group.client.rank_statuses(group.clock())[0]
    assert (status.state, status.death_cause, status.deaths) == ("dead", "out of memory", 1)
    assert [m for m in group.said if isinstance(m, RankDied)] == [RankDied(ZERO, "out of memory")]


async def test_a_restarted_rank_takes_requests_and_frames_of_its_old_life_are_dropped(group: FakeGroup) -> None:
    handle, _ = group.add_request(pinned_rank=0)
    old = group.engines[0]
    group.tell_state(RankRecord(0, 1, "dead", "killed", 1, None, True), RankRecord(1, 1, "ready"))
    await group.until(lambda: group.state(0) == "dead")
    group.tell_state(RankRecord(0, 2, "restarting", "killed", 1), RankRecord(1, 1, "ready"))
    await group.until(lambda: group.state(0) == "restarting")
    await group.begin_life(RankId(0, 2))
    await group.until(lambda: group.state(0) == "ready")

    stale = group.client.num_stale_frames
    await old.say(group.outputs(ZERO, 9, handle))
    await group.until(lambda: group.client.num_stale_frames == stale + 1)
    (lost,) = group.client.on_engine_died(EngineDied(ZERO, "killed"))
    assert lost.request.handle == handle
    assert group.add_request(pinned_rank=0)[1] == RankId(0, 2)
    assert isinstance(await group.engines[0].command(), AddRequest)
    assert [e.kind for e in group.client.events.events(0.0) if e.rank == 0] == ["ready", "death", "restart", "ready"]


async def test_a_front_end_that_starts_while_a_rank_restarts_serves_with_the_others_and_takes_that_one_in_later(
    idle_group: FakeGroup,
) -> None:
    starting = await idle_group.begin_start()
    await idle_group.begin_life(ZERO)
    await idle_group.until(lambda: idle_group.state(0) == "ready")
    assert not starting.done()  # rank 1 may be as well as rank 0
    idle_group.tell_state(RankRecord(0, 1, "ready"), RankRecord(1, 2, "restarting", "killed", 1))
    async with asyncio.timeout(DEADLINE_S):
        await starting
    assert idle_group.add_request()[1] == ZERO
    await idle_group.begin_life(RankId(1, 2))
    await idle_group.until(lambda: idle_group.state(1) == "ready")
    assert idle_group.add_request(pinned_rank=1)[1] == RankId(1, 2)


@pytest.mark.parametrize("idle_group", [2], indirect=True)
async def test_a_front_end_that_starts_again_serves_with_the_ranks_that_answer_and_does_not_wait_for_a_stopped_one(
    idle_group: FakeGroup,
) -> None:
    group = idle_group
    starting = await group.begin_start()
    await group.begin_life(ZERO)
    group.tell_state(RankRecord(0, 1, "ready"), RankRecord(1, 1, "ready"))
    await group.until(lambda: group.client.ranks[1].life.is_up and group.state(0) == "ready")
    alive = Heartbeat(ZERO, 1, False, 0, RankLoad(), SchedulerStats())
    group.clock.sleep(2.5)
    await group.engines[0].say(alive)
    assert not starting.done()
    group.clock.sleep(1.0)
    async with asyncio.timeout(DEADLINE_S):
        await starting
    assert (group.state(0), group.state(1)) == ("ready", "suspect")
    handle, rank_id = group.add_request()
    assert rank_id == ZERO
    with pytest.raises(OverloadedError, match="rank 1 is suspect"):
        group.add_request(pinned_rank=1)
    group.client.release([handle])
    group.clock.sleep(60.0)
    await group.engines[0].say(alive)
    stalled = RankStalled(ONE, "stalled: it is ready and did not answer a front end for 63.5 s")
    await group.until(lambda: stalled in group.said)
    await group.begin_life(ONE)  # it goes on after all
    await group.until(lambda: group.state(1) == "ready")


async def test_a_group_that_starts_waits_for_all_its_ranks_however_long_one_is_silent(idle_group: FakeGroup) -> None:
    group = idle_group
    starting = await group.begin_start()
    await group.begin_life(ZERO)
    group.tell_state(RankRecord(0, 1, "ready"), RankRecord(1, 1, "ready"))
    await group.until(lambda: group.client.ranks[1].life.is_up and group.state(0) == "ready")
    group.clock.sleep(3.5)
    await group.until(lambda: group.state(1) == "suspect")
    assert not starting.done()
    await group.begin_life(ONE)
    async with asyncio.timeout(DEADLINE_S):
        await starting


@pytest.mark.parametrize("error", [EngineGenerateError("no adapter"), OSError("no space left on the disk")])
async def test_a_restarted_rank_that_cannot_be_prepared_is_dead_and_its_launcher_is_told(
    group: FakeGroup, error: Exception
) -> None:
    async def prepare(rank_id: RankId) -> None:
        raise error

    group.client.ranks.before_serving = prepare
    group.tell_state(RankRecord(0, 1, "dead", "killed", 1, None, True), RankRecord(1, 1, "ready"))
    await group.until(lambda: group.state(0) == "dead")
    await group.begin_life(RankId(0, 2))
    await group.until(lambda: RankDied(RankId(0, 2), f"it could not be prepared: {error}") in group.said)
    assert group.state(0) == "dead"


async def answer(group: FakeGroup, rank: int, error: str | None = None, *, is_refusal: bool = False) -> None:
    call = await group.engines[rank].command()
    assert isinstance(call, UtilityCall)
    await group.engines[rank].say(UtilityResult(RankId(rank, 1), call.call_id, error=error, is_refusal=is_refusal))
    result = await group.received()
    assert isinstance(result, UtilityResult)
    group.client.on_utility_result(result)


async def test_a_rank_that_could_not_pause_when_another_did_serves_nobody_any_more(group: FakeGroup) -> None:
    pausing = asyncio.create_task(group.client.tell_ranks("pause", insist=True))
    await answer(group, 0)
    await answer(group, 1, "out of memory")
    assert await pausing == 1
    cause = "it did not do what others did: rank 1 (epoch 1): out of memory"
    await group.until(lambda: RankDied(ONE, cause) in group.said)
    assert (group.state(0), group.state(1)) == ("ready", "dead")


async def test_a_rank_that_refuses_what_another_does_lives_on(group: FakeGroup) -> None:
    pausing = asyncio.create_task(group.client.tell_ranks("pause", "wait", insist=True))
    await answer(group, 0)
    await answer(group, 1, "called off by another pause", is_refusal=True)
    with pytest.raises(InvalidRequestError, match="called off"):
        await pausing
    assert (group.state(0), group.state(1)) == ("ready", "ready")


async def test_what_no_rank_could_do_is_an_error_and_costs_no_rank_its_life(group: FakeGroup) -> None:
    waking = asyncio.create_task(group.client.tell_ranks("wake_up", insist=True))
    await answer(group, 0, "out of memory")
    await answer(group, 1, "out of memory")
    with pytest.raises(EngineGenerateError, match="out of memory"):
        await waking
    assert (group.state(0), group.state(1)) == ("ready", "ready")


async def test_a_request_for_a_rank_that_has_hung_up_is_not_on_the_books(group: FakeGroup) -> None:
    group.engines[0].hang_up()

    def is_noticed() -> bool:
        try:
            group.add_request(pinned_rank=0)
        except EngineDeadError:
            return True
        return False

    await group.until(is_noticed)
    booked = group.client.ledger.handles_on(ZERO)
    with pytest.raises(OverloadedError, match="rank 0 cannot be reached, rank 1 is ready"):
        group.add_request(pinned_rank=0)
    assert group.client.ledger.handles_on(ZERO) == booked


async def test_frames_that_are_none_of_ours_are_counted_and_harm_nobody(group: FakeGroup) -> None:
    await group.engines[0].say_bytes(b"\xc1 nonsense")
    await group.engines[0].say(RankDied(RankId(7, 1), "of a rank that does not exist"))
    await group.until(lambda: group.client.num_malformed_frames == group.client.num_stale_frames == 1)
    assert group.state(0) == "ready"


async def test_a_client_whose_own_clockwork_fails_says_that_it_is_dead(group: FakeGroup) -> None:
    def broken(now: float) -> None:
        raise RuntimeError("a wheel is off")

    group.client.ranks.look_for_silence = broken  # type: ignore[method-assign]
    received = [await group.received() for _ in range(3)]
    assert {type(message) for message in received[:2]} == {EngineDied}
    assert isinstance(received[2], EngineFailed)
    assert "a wheel is off" in (group.client.failure or "")


async def test_tokens_that_cannot_be_booked_are_delivered_all_the_same(group: FakeGroup) -> None:
    def broken(outputs: EngineCoreOutputs) -> None:
        raise RuntimeError("a tenant's counter is off")

    handle, rank_id = group.add_request()
    assert rank_id is not None
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(str(what["exception"])))
    group.client._note_tokens = broken  # type: ignore[method-assign]
    await group.engines[rank_id.rank].say(group.outputs(rank_id, 0, handle))
    received = await group.received()
    assert isinstance(received, EngineCoreOutputs)
    assert list(received.handles) == [handle]
    assert errors == ["a tenant's counter is off"]


async def test_nobody_but_a_rank_itself_announces_its_next_life(group: FakeGroup) -> None:
    somebody = await group.begin_life(RankId(7, 1))  # there is no rank 7, or not yet
    somebody.rank_id = RankId(0, 2)
    await somebody.say_ready()
    await group.until(lambda: group.client.num_stale_frames == 1)
    assert (group.state(0), group.add_request(pinned_rank=0)[1]) == ("ready", ZERO)


async def test_flood_of_malformed_frames_is_counted_and_does_not_fill_the_log(
    group: FakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(1000):
        await group.engines[0].say_bytes(b"garbage %d" % i)
    await group.until(lambda: group.client.num_malformed_frames == 1000)
    assert len([r for r in caplog.records if "malformed" in r.getMessage()]) == 10

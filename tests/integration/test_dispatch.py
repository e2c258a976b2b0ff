"""Late binding and deadlines over real engine processes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from balancer.dispatch_queue import LOOK_AHEAD
from cores.control_messages import AbortElsewhere
from gateway import AsyncLLM
from gateway.config import BalancerConfig, FaultConfig
from gateway.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from gateway.outputs import RequestOutput
from tests.integration.llm_harness import FINAL_ONLY, SLOW_MS, Start, frozen, params, set_step_ms, until

LATE = BalancerConfig(dispatch="late")
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 64}  # a rank has room for 2 sequences or 128 prompt tokens


def num_queued(llm: AsyncLLM) -> int:
    return llm.status().front_ends[0].queued


async def answer(llm: AsyncLLM, num_tokens: int, request_id: str = "r", **options: object) -> RequestOutput:
    sampling = params(num_tokens, output_kind=FINAL_ONLY)
    (output,) = [output async for output in llm.generate("a prompt", sampling, request_id, **options)]  # type: ignore[arg-type]
    return output


async def test_flood_waits_in_the_front_end_and_every_request_is_whole(start: Start) -> None:
    llm = await start(2, balancer=LATE, engine_settings=SMALL)
    with frozen(llm):
        tasks = [asyncio.create_task(answer(llm, 1 + i % 7, str(i))) for i in range(60)]
        await until(lambda: llm.output_processor.num_unfinished == 60, "all are in flight")
        assert num_queued(llm) > 30
    balancer = llm.status().balancer
    assert balancer is not None
    assert balancer.dispatch == "late"
    outputs = await asyncio.gather(*tasks)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(60)]
    assert all(output.rank is not None for output in outputs)
    # How many each gets depends on how fast it is: the next goes to whichever has room.
    assert all(rank.requests_total > 0 for rank in llm.status().ranks)
    assert sum(rank.requests_total for rank in llm.status().ranks) == 60
    assert num_queued(llm) == 0


async def test_urgent_request_passes_those_that_wait(start: Start) -> None:
    llm = await start(2, step_ms=4, balancer=LATE, engine_settings=SMALL)
    ended: list[str] = []

    async def note(name: str, priority: int) -> None:
        await answer(llm, 8, name, priority=priority)
        ended.append(name)

    with frozen(llm):
        tasks = [asyncio.create_task(note(str(i), 0)) for i in range(40)]
        await until(lambda: llm.output_processor.num_unfinished == 40, "all are in flight")
        tasks.append(asyncio.create_task(note("urgent", -1)))
        await until(lambda: llm.output_processor.num_unfinished == 41, "so is the urgent one")
    await asyncio.gather(*tasks)
    assert ended.index("urgent") < 20


async def test_tenant_with_one_request_passes_one_with_many(start: Start) -> None:
    fair = BalancerConfig(dispatch="late", dispatch_order="fair")
    llm = await start(2, step_ms=4, balancer=fair, engine_settings=SMALL)
    ended: list[str] = []

    async def note(name: str, tenant: str) -> None:
        await answer(llm, 8, name, tenant=tenant)
        ended.append(name)

    tasks = [asyncio.create_task(note(str(i), "greedy")) for i in range(40)]
    await until(lambda: num_queued(llm) > 20, "most wait here")
    tasks.append(asyncio.create_task(note("modest", "another")))
    await asyncio.gather(*tasks)
    assert ended.index("modest") < 30


async def test_what_waits_is_not_touched_by_a_death(start: Start) -> None:
    llm = await start(2, step_ms=4, balancer=LATE, engine_settings=SMALL, fault_tolerance=FaultConfig(engine_restarts=3))
    with frozen(llm):
        tasks = [asyncio.create_task(answer(llm, 10, str(i))) for i in range(40)]
        await until(lambda: llm.output_processor.num_unfinished == 40, "all are in flight")
        pid = llm.status().ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    outputs = await asyncio.gather(*tasks)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [10] * 40
    assert llm.status().totals.moved <= 10


async def test_what_waits_for_a_rank_that_has_died_for_good_ends_and_stands_in_nobodys_way(start: Start) -> None:
    llm = await start(2, balancer=LATE, engine_settings=SMALL, fault_tolerance=FaultConfig(engine_restarts=0))
    with frozen(llm):
        pinned = [asyncio.create_task(answer(llm, 4, f"pinned-{i}", data_parallel_rank=1)) for i in range(40)]
        await until(lambda: num_queued(llm) > LOOK_AHEAD, "most wait here")
        others = [asyncio.create_task(answer(llm, 4, f"other-{i}")) for i in range(4)]
        await until(lambda: llm.output_processor.num_unfinished == 44, "so do others")
        pid = llm.status().ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert all(output.finished for output in await asyncio.gather(*others))
    ends = await asyncio.gather(*pinned, return_exceptions=True)
    assert any(isinstance(end, OverloadedError) for end in ends)
    assert all(isinstance(end, OverloadedError | RequestOutput) for end in ends)  # what the rank had goes on elsewhere


async def test_reader_that_leaves_the_queue_costs_no_rank_anything(start: Start) -> None:
    llm = await start(2, step_ms=4, balancer=LATE, engine_settings=SMALL)
    with frozen(llm):
        tasks = [asyncio.create_task(answer(llm, 10, str(i))) for i in range(40)]
        await until(lambda: llm.output_processor.num_unfinished == 40, "all are in flight")
        for task in tasks[-15:]:
            task.cancel()
        await until(lambda: llm.output_processor.num_unfinished == 25, "fifteen have left")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(rank.requests_total for rank in llm.status().ranks) == 25


async def test_pause_aborts_what_waits_too_unless_it_is_to_be_kept(start: Start) -> None:
    llm = await start(2, step_ms=4, balancer=LATE, engine_settings=SMALL)
    tasks = [asyncio.create_task(answer(llm, 2000, str(i))) for i in range(40)]  # for a minute
    await until(lambda: llm.status().totals.requests == 40, "all are under way, here or at a rank")
    await llm.pause_generation("keep")
    assert num_queued(llm) > 0
    await llm.resume_generation()
    await llm.pause_generation("abort")
    assert num_queued(llm) == 0
    ended = {output.outputs[0].finish_reason for output in await asyncio.gather(*tasks)}
    assert "abort" in ended
    assert ended <= {"abort", "length"}
    await llm.resume_generation()
    assert len((await answer(llm, 5)).outputs[0].token_ids) == 5


async def test_another_front_ends_pause_aborts_what_waits_here(start: Start) -> None:
    llm = await start(2, step_ms=4, balancer=LATE, engine_settings=SMALL)
    tasks = [asyncio.create_task(answer(llm, 2000, str(i))) for i in range(40)]
    await until(lambda: num_queued(llm) > 20, "most wait here")
    waiting = num_queued(llm)
    llm.core_client.aborts.on_message(AbortElsewhere(None))  # the launcher passes it on
    assert num_queued(llm) == 0
    assert llm.status().totals.aborted == waiting
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_impossible_pin_is_refused_and_not_queued(start: Start) -> None:
    llm = await start(2, balancer=LATE)
    with pytest.raises(InvalidRequestError, match="data_parallel_rank"):
        await answer(llm, 5, data_parallel_rank=7)
    assert (await answer(llm, 5, data_parallel_rank=1)).rank == 1


@pytest.mark.parametrize("balancer", [BalancerConfig(), LATE], ids=["early", "late"])
async def test_request_whose_time_is_over_before_its_first_token_ends(start: Start, balancer: BalancerConfig) -> None:
    llm = await start(2, step_ms=20, balancer=balancer, engine_settings={"max_num_seqs": 1})
    long = [asyncio.create_task(answer(llm, 8000, f"long {i}")) for i in range(8)]
    await until(lambda: sum(rank.running for rank in llm.status().ranks) == 2, "both ranks have their hands full")
    before = sum(rank.requests_total for rank in llm.status().ranks)
    with pytest.raises(DeadlineExceededError, match="50 ms"):
        await answer(llm, 5, "hurried", timeout_s=0.05)
    assert llm.status().totals.expired == 1
    if balancer.dispatch == "late":
        assert sum(rank.requests_total for rank in llm.status().ranks) == before  # it cost no rank a token
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)


async def test_request_that_has_begun_in_time_may_take_its_time(start: Start) -> None:
    llm = await start(1, step_ms=SLOW_MS)
    task = asyncio.create_task(answer(llm, 300, timeout_s=3600.0))
    await until(lambda: any(state.accepted for state in llm.output_processor._states.values()), "it has begun")
    (state,) = llm.output_processor._states.values()
    llm.sender._expire(state.stream.internal_id, 3600.0)  # as its timer would
    await set_step_ms(llm, 1.0)
    assert len((await task).outputs[0].token_ids) == 300
    assert llm.status().totals.expired == 0

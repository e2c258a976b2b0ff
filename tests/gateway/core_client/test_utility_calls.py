"""Utility calls: all ranks or an error, late and foreign answers find nobody."""

from __future__ import annotations

import asyncio

import pytest

from cores.messages import RankId, UtilityResult
from gateway.core_client.utility_calls import UtilityCalls
from gateway.errors import EngineDeadError, EngineGenerateError, InvalidRequestError

ZERO, ONE = RankId(0, 1), RankId(1, 1)


async def test_each_rank_answers_its_own_future() -> None:
    calls = UtilityCalls()
    call_id, futures = calls.begin([ZERO, ONE])
    calls.on_result(UtilityResult(ONE, call_id, "one"))
    calls.on_result(UtilityResult(ZERO, call_id, None))
    assert await asyncio.gather(*futures) == [None, "one"]
    assert calls.num_pending == 0


async def test_an_error_names_the_rank() -> None:
    calls = UtilityCalls()
    call_id, (future,) = calls.begin([ONE])
    calls.on_result(UtilityResult(ONE, call_id, error="no room"))
    with pytest.raises(EngineGenerateError, match=r"rank 1 \(epoch 1\): no room"):
        await future


async def test_a_refusal_is_the_callers_fault() -> None:
    calls = UtilityCalls()
    call_id, (future,) = calls.begin([ONE])
    calls.on_result(UtilityResult(ONE, call_id, error="no such directory", is_refusal=True))
    with pytest.raises(InvalidRequestError, match=r"rank 1 \(epoch 1\): no such directory"):
        await future


async def test_death_fails_only_the_dead_ranks_calls() -> None:
    calls = UtilityCalls()
    call_id, (zero, one) = calls.begin([ZERO, ONE])
    calls.on_engine_died(ZERO, "killed")
    calls.on_result(UtilityResult(ONE, call_id, 1))
    with pytest.raises(EngineDeadError, match="killed"):
        await zero
    assert await one == 1


async def test_an_answer_after_the_caller_has_gone_is_dropped() -> None:
    calls = UtilityCalls()
    call_id, (future,) = calls.begin([ZERO])
    future.cancel()
    await asyncio.sleep(0)
    assert calls.num_pending == 0
    calls.on_result(UtilityResult(ZERO, call_id, 1))
    calls.on_result(UtilityResult(RankId(0, 2), call_id, 1))
    assert calls.num_pending == 0

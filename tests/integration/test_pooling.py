"""Embedding requests over two real engine processes: spread, counted, refused and ended like all others."""

from __future__ import annotations

import asyncio
import math

import pytest

from cores.pooling_params import PoolingParams
from gateway import AsyncLLM
from gateway.errors import EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.outputs import PoolingRequestOutput
from tests.integration.llm_harness import Start, collect, frozen, params, until


async def embed(llm: AsyncLLM, prompt: str, request_id: str = "r", rank: int | None = None) -> PoolingRequestOutput:
    (output,) = [o async for o in llm.encode(prompt, PoolingParams(), request_id, data_parallel_rank=rank)]
    return output


async def test_a_vector_is_the_same_on_every_rank_and_its_prompt_is_counted(start: Start) -> None:
    llm = await start(2, engine_settings={"runner": "pooling"})
    assert await llm.get_supported_tasks() == ("embed",)
    outputs = await asyncio.gather(*(embed(llm, f"text {i % 10}", str(i), rank=i // 10) for i in range(20)))
    assert [output.rank for output in outputs] == [0] * 10 + [1] * 10
    assert [output.vector for output in outputs[:10]] == [output.vector for output in outputs[10:]]
    assert len({output.vector for output in outputs}) == 10
    assert all(len(output.values) == 64 and math.isclose(math.hypot(*output.values), 1, rel_tol=1e-5) for output in outputs)
    assert llm.status().totals.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    with pytest.raises(InvalidRequestError, match="makes embeddings"):
        await collect(llm, "x", params(1))
    with pytest.raises(InvalidRequestError, match="dimensions must be one of 64"):
        await anext(llm.encode("x", PoolingParams(dimensions=5), "r"))
    with pytest.raises(InvalidRequestError, match="context length is 8192"):
        await anext(llm.encode([5] * 8193, PoolingParams(), "r"))


async def test_a_request_for_a_vector_can_fail_alone_be_cancelled_and_be_ended_by_a_pause(start: Start) -> None:
    # Of 8,000 tokens in four steps, or longer than the engine needs to read two commands that are there already.
    llm = await start(1, step_ms=200, fault="fail_request_at_token=1@epoch=1", engine_settings={"runner": "pooling"})
    with pytest.raises(EngineGenerateError, match="simulated fault"):
        await embed(llm, "x")
    with frozen(llm):
        cancelled = asyncio.create_task(embed(llm, "word " * 8000))
        await until(lambda: llm.output_processor.num_unfinished == 1, "it is in flight")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    await until(lambda: llm.status().ranks[0].running == llm.status().ranks[0].waiting == 0, "its rank knows")
    with frozen(llm):
        paused = asyncio.create_task(embed(llm, "word " * 8000))
        await until(lambda: llm.output_processor.num_unfinished == 1, "it is in flight")
        pausing = asyncio.create_task(llm.pause_generation())
        await until(lambda: bool(llm.core_client._utilities._pending), "it is asked to pause")
    await pausing
    with pytest.raises(OverloadedError, match="abort"):
        await paused
    await llm.resume_generation()

"""What tests of an embedded `AsyncLLM` share: prompts, readers and waits. Its fixture is in conftest.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from gateway import AsyncLLM, SamplingParams
from gateway.outputs import RequestOutput
from gateway.sampling_params import RequestOutputKind

DEADLINE_S = 90.0
# Of a step, where a test arranges something while requests run: none of 300 tokens ends within a minute.
SLOW_MS = 200.0
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
Start = Callable[..., Awaitable[AsyncLLM]]


async def check_empty(llm: AsyncLLM) -> None:
    await until(lambda: is_idle(llm), "all maps are empty and all ranks idle")
    llm.output_processor.check_invariants()
    llm.core_client.ledger.check_invariants()


def is_idle(llm: AsyncLLM) -> bool:
    ranks = [rank for rank in llm.status().ranks if rank.state != "dead"]
    return (
        llm.output_processor.num_unfinished == 0
        and llm.core_client.ledger.num_in_flight == 0
        and all(rank.waiting == rank.running == 0 and rank.kv_cache_usage == 0 for rank in ranks)
    )


@contextlib.contextmanager
def frozen(llm: AsyncLLM) -> Iterator[None]:
    """No rank gets on in here: what the test arranges meanwhile lasts, however slow or fast the machine is."""
    pids = [rank.pid for rank in llm.status().ranks if rank.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def set_step_ms(llm: AsyncLLM, step_ms: float) -> None:
    await llm.collective_rpc("set_step_ms", args=[step_ms])


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0} | fields)


async def collect(llm: AsyncLLM, prompt: Any, sampling: SamplingParams, request_id: str = "r") -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, sampling, request_id)]

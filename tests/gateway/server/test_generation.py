"""Several prompts in one request: their streams become one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cores.sampling_params import RequestOutputKind, SamplingParams
from gateway.errors import EngineGenerateError
from gateway.outputs import RequestOutput
from gateway.server.generation import merge
from gateway.testing import FakeRequest

N = 2


def make_requests(count: int) -> list[FakeRequest]:
    params = SamplingParams(n=N, output_kind=RequestOutputKind.DELTA)
    return [FakeRequest(f"id-{i}", [1], None, params, {}) for i in range(count)]


def merged(requests: list[FakeRequest]) -> AsyncGenerator[RequestOutput, None]:
    return merge([request.outputs() for request in requests], N)


async def test_indexes_are_those_of_the_whole_request() -> None:
    requests = make_requests(3)
    for request in reversed(requests):
        for index in range(N):
            request.put("x", index, finish_reason="stop")
    indexes = [completion.index async for output in merged(requests) for completion in output.outputs]
    assert sorted(indexes) == list(range(6))


async def test_an_early_stream_does_not_wait_for_a_late_one() -> None:
    early, late = make_requests(2)
    outputs = merged([early, late])
    early.put("x", 1)
    assert (await anext(outputs)).outputs[0].index == 1
    late.put("y", 0)
    assert (await anext(outputs)).outputs[0].index == N
    await outputs.aclose()


async def test_no_stream_runs_ahead_of_the_reader_by_more_than_one_output() -> None:
    requests = make_requests(2)
    for request in requests:
        for _ in range(10):
            request.put("x", 0)
    outputs = merged(requests)
    await anext(outputs)
    for _ in range(50):
        await asyncio.sleep(0)
    assert [request.num_unread for request in requests] == [8, 9] or [r.num_unread for r in requests] == [9, 9]
    await outputs.aclose()


@pytest.mark.parametrize("how", ["close", "error", "cancel"])
async def test_every_stream_is_closed_however_it_ends(how: str) -> None:
    requests = make_requests(3)
    outputs = merged(requests)
    requests[0].put("x", 0)
    await anext(outputs)
    if how == "close":
        await outputs.aclose()
    elif how == "error":
        requests[1].fail(EngineGenerateError("bad"))
        with pytest.raises(EngineGenerateError):
            await anext(outputs)
    else:
        reading: asyncio.Task[Any] = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert all(request.ended.is_set() for request in requests)

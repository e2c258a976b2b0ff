"""One trace of a request whose rank is killed: from the caller's context to a collector, over HTTP all the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.gateway.otlp_collector import running_collector

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_a_request_that_moves_is_one_trace_with_http_ranks_and_the_move(
    serve: Any, slow_simulated: list[str], poll: Callable[..., Any]
) -> None:
    async with running_collector() as collector:
        flags = ["-dp", "2", "--otlp-traces-endpoint", collector.endpoint]
        server = await asyncio.to_thread(lambda: serve(*slow_simulated, *flags))
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-data-parallel-rank": "0"}
        body = {"model": "tiny", "prompt": "one two", "ignore_eos": True, "max_tokens": 400, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/completions", json=body, headers=headers) as response,
        ):
            await response.content.readuntil(b"\n\n")  # it runs, and will for a minute
            os.kill((await asyncio.to_thread(server.rank, 0))["pid"], signal.SIGKILL)
            await asyncio.to_thread(poll, lambda: next_life_is_ready(server), "the next life of rank 0")
            await asyncio.to_thread(server.set_step_ms, 1)
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.to_thread(server.stop)  # sends what is left
        spans = collector.all_spans()
    by_name = {span.name: span for span in spans}
    assert sorted(span.name for span in spans) == [
        "POST /v1/completions", "decode", "llm_request", "move", "prefill", "queue", "rank", "rank",
    ]  # fmt: skip
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    http, request, move = (by_name[name] for name in ("POST /v1/completions", "llm_request", "move"))
    assert http.parent_span_id.hex() == CALLER
    assert request.parent_span_id == http.span_id
    assert {span.parent_span_id for span in spans if span not in (http, request)} == {request.span_id}
    assert {a.key: a.value.int_value for a in move.attributes} == {"gateway.from_rank": 0, "gateway.to_rank": 1}
    assert http.start_time_unix_nano <= request.start_time_unix_nano < move.start_time_unix_nano < move.end_time_unix_nano
    assert move.end_time_unix_nano < request.end_time_unix_nano <= http.end_time_unix_nano


def next_life_is_ready(server: Any) -> bool:
    rank = server.rank(0)
    return bool((rank["epoch"], rank["state"]) == (2, "ready"))

"""From one HTTP request to the outputs of one or more engine requests. Knows headers and prompts, no response format."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from cores.sampling_params import SamplingParams
from gateway.engine_client import EngineClient, TokenizedPrompt
from gateway.errors import InvalidRequestError
from gateway.outputs import RequestOutput
from gateway.server.edge import PLAIN_ID, caller_trace_headers, is_plain_id
from gateway.server.state import STATE, TRACE_HEADERS


@dataclass(frozen=True, slots=True)
class Routing:
    """What the headers say about where and how a request is to be served."""

    request_id: str
    data_parallel_rank: int | None = None
    session_id: str | None = None
    tenant: str | None = None
    trace_headers: dict[str, str] | None = None
    timeout_s: float | None = None

    @classmethod
    def from_request(cls, request: web.Request, request_id: str) -> Routing:
        """Raises `InvalidRequestError`."""
        headers = request.headers
        trace = request.get(TRACE_HEADERS) or caller_trace_headers(request)
        rank = _rank(headers.get("X-data-parallel-rank"))
        session_id, timeout_s = _session_id(headers.get("X-Session-Id")), _timeout_s(headers.get("X-Request-Timeout-Ms"))
        tenant = request.app[STATE].keys.tenant(headers.get("Authorization"))
        return cls(request_id, rank, session_id, tenant, trace or None, timeout_s)


def _rank(text: str | None) -> int | None:
    if text is None:
        return None
    # Not `int()`: it takes "1_0", "+1" and digits of other scripts. Which ranks there are, the engine client says.
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise InvalidRequestError(f"X-data-parallel-rank must be the number of a rank, got {text!r}", "X-data-parallel-rank")
    return int(text)


def _session_id(text: str | None) -> str | None:
    # It goes to an engine as UTF-8, which not every header can be turned into.
    if text is not None and not is_plain_id(text):
        raise InvalidRequestError(f"X-Session-Id must be {PLAIN_ID}", "X-Session-Id")
    return text


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise InvalidRequestError(
            f"X-Request-Timeout-Ms must be a whole number from 1 to 999999999, got {text!r}", "X-Request-Timeout-Ms"
        )
    return int(text) / 1000


def generate(
    engine: EngineClient,
    prompts: Sequence[TokenizedPrompt],
    params: SamplingParams,
    routing: Routing,
    *,
    lora_request: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of all prompts, as they come. Choice j of prompt i has the index i × n + j. Closing it aborts all."""
    streams = [
        engine.generate(
            prompt.token_ids,
            params,
            routing.request_id,
            lora_request=lora_request,
            trace_headers=routing.trace_headers,
            priority=priority,
            data_parallel_rank=routing.data_parallel_rank,
            session_id=routing.session_id,
            tenant=routing.tenant,
            prompt_text=prompt.text,
            cache_salt=cache_salt,
            timeout_s=routing.timeout_s,
        )
        for prompt in prompts
    ]
    # Nearly every request has one prompt: nothing stands between its generator and its reader.
    return streams[0] if len(streams) == 1 else merge(streams, params.n)


async def without_output(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The same outputs, in which nothing was said: what is left is the prompt in front of them."""
    async with aclosing(outputs):
        async for output in outputs:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.stop_reason = "", [], None
                completion.logprobs = None if completion.logprobs is None else []
                completion.finish_reason = "length" if completion.finish_reason == "stop" else completion.finish_reason
            yield output


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]], n: int) -> AsyncGenerator[RequestOutput, None]:
    """One item of each stream is fetched ahead and no more, so that a slow reader holds back every stream."""
    tasks = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # In the order of the prompts: `done` is a set.
            for task in sorted(done, key=tasks.__getitem__):
                i = tasks.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                for completion in output.outputs:
                    completion.index += i * n
                tasks[asyncio.ensure_future(anext(streams[i]))] = i
                yield output
    finally:
        for task in tasks:
            task.cancel()
        # Each must have ended before its stream can be closed. Their errors die with the request that has failed already.
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

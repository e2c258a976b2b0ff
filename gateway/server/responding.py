"""Writes answers to a client, streamed or whole. Knows the connection; what the bytes say is made elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

from aiohttp import ClientConnectionResetError, HttpVersion11, web

from gateway.outputs import RequestOutput
from gateway.server.answers import Answer, ApiShape, whole_answer
from gateway.server.failure import Failure, to_failure
from gateway.server.sse import make_encoder
from gateway.server.state import HAS_LEFT, REQUEST_ID, STATE

logger = logging.getLogger(__name__)

CLOSE_DELAY_S = 0.25
# Of a stream, in the process, behind what the kernel holds. What is above waits as tokens, which take a tenth of an event.
MAX_UNSENT_BYTES = 16 * 1024
RANK_HEADER = "X-Gateway-Rank"
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx collects a response before it passes it on, unless told otherwise
}


class Encoder(Protocol):
    """The events of one stream, of whichever API."""

    @property
    def is_finished(self) -> bool:
        """The last output has been encoded."""

    @property
    def is_slow(self) -> bool:
        """The next output is to be encoded in a thread."""

    def open(self) -> bytes: ...
    def encode(self, output: RequestOutput) -> bytes: ...
    def close(self) -> bytes: ...
    def fail(self, failure: Failure) -> bytes: ...


async def respond(
    request: web.Request, shape: ApiShape, answer: Answer, outputs: AsyncGenerator[RequestOutput, None], *, stream: bool
) -> web.StreamResponse:
    """Raises what `EngineClient.generate` raises, as long as nothing has been written. Cancelling it aborts."""
    async with aclosing(outputs):
        if stream:
            return await write_stream(request, outputs, make_encoder(shape, answer))
        return await write_whole(outputs, partial(whole_answer, shape, answer))


async def write_whole(
    outputs: AsyncGenerator[RequestOutput, None], encode: Callable[[Sequence[RequestOutput]], bytes]
) -> web.Response:
    """Raises what `EngineClient.generate` raises."""
    finals = [output async for output in outputs]
    if any(output.prompt_logprobs is not None for output in finals):
        body = await asyncio.to_thread(encode, finals)  # by the thousand, for a long prompt
    else:
        body = encode(finals)
    return web.Response(body=body, content_type="application/json", charset="utf-8", headers=_rank_header(finals[0]))


async def write_stream(
    request: web.Request, outputs: AsyncGenerator[RequestOutput, None], encoder: Encoder
) -> web.StreamResponse:
    """Raises what `EngineClient.generate` raises, as long as nothing has been written."""
    # Nothing is sent before the first output: until then an error is an ordinary HTTP answer, and then the rank is known.
    first = await anext(outputs)
    response = web.StreamResponse(headers=SSE_HEADERS | _rank_header(first))
    if request.version < HttpVersion11:
        response.force_close()  # without chunks only the connection's end is the stream's
    try:
        await response.prepare(request)
        if request.transport is not None:
            request.transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        try:
            end = await _write_outputs(request, response, first, outputs, encoder)
        except ClientConnectionResetError:
            raise
        except Exception as error:
            end = encoder.fail(_logged_failure(request, error))
            _close_when_idle(request)
        await response.write_eof(end)
    except ClientConnectionResetError:
        request[HAS_LEFT] = True
        logger.debug("request %s: the client is gone", request[REQUEST_ID])
    return response


async def _write_outputs(
    request: web.Request,
    response: web.StreamResponse,
    first: RequestOutput,
    outputs: AsyncGenerator[RequestOutput, None],
    encoder: Encoder,
) -> bytes:
    """Writes all but the last bytes, which it returns: they go out together with the end of the body."""
    protocol, writer = request.protocol, request.writer
    data = encoder.open() + await _encode(encoder, first)
    if not encoder.is_finished:
        await response.write(data)
    async for output in outputs:
        # Once per output of every stream: the hot path of the server.
        data = encoder.encode(output) if not encoder.is_slow else await _encode(encoder, output)
        if data and not encoder.is_finished:
            # `response.write` does the same behind one more coroutine and three checks: 0.9 µs.
            await writer.write(data)
            # aiohttp itself waits for a slow reader only once in 64 KiB. Waiting as soon as the transport asks for it lets
            # the tokens merge in the request's collector instead of piling up as bytes.
            if protocol.writing_paused:
                await writer.drain()
    return data + encoder.close()


async def _encode(encoder: Encoder, output: RequestOutput) -> bytes:
    return await asyncio.to_thread(encoder.encode, output) if encoder.is_slow else encoder.encode(output)


def _logged_failure(request: web.Request, error: Exception) -> Failure:
    """What ends a stream that had begun."""
    failure = to_failure(error)
    log = logger.exception if failure.is_bug else logger.warning
    log("request %s failed in its stream: %s: %s", request[REQUEST_ID], failure.type, error)
    return failure


def _close_when_idle(request: web.Request) -> None:
    """The connection ends after an error, but not at once: its headers promised to keep it, and a client that trusts them and
    sends its next request at the same moment would lose that one too. One that does so goes on."""
    protocol, busy_connections = request.protocol, request.app[STATE].busy_connections

    def close_if_idle() -> None:
        if protocol not in busy_connections:
            protocol.force_close()  # after what is still buffered has gone out

    asyncio.get_running_loop().call_later(CLOSE_DELAY_S, close_if_idle)


def _rank_header(output: RequestOutput) -> dict[str, str]:
    return {} if output.rank is None else {RANK_HEADER: str(output.rank)}

"""Writes answers to a client, streamed or whole. Knows the connection; what the bytes say is made elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import ClientConnectionResetError, web

from gateway.outputs import RequestOutput
from gateway.server.answers import Answer, ApiShape, whole_answer
from gateway.server.failure import to_failure
from gateway.server.sse import StreamEncoder
from gateway.server.state import REQUEST_ID, STATE

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


async def respond(
    request: web.Request, shape: ApiShape, answer: Answer, outputs: AsyncGenerator[RequestOutput, None], *, stream: bool
) -> web.StreamResponse:
    """Raises what `EngineClient.generate` raises, as long as nothing has been written. Cancelling it aborts."""
    async with aclosing(outputs):
        if stream:
            return await _stream(request, outputs, StreamEncoder(shape, answer))
        return await _whole(shape, answer, outputs)


async def _whole(shape: ApiShape, answer: Answer, outputs: AsyncGenerator[RequestOutput, None]) -> web.Response:
    finals = [output async for output in outputs]
    if any(output.prompt_logprobs is not None for output in finals):
        body = await asyncio.to_thread(whole_answer, shape, answer, finals)  # by the thousand, for a long prompt
    else:
        body = whole_answer(shape, answer, finals)
    return web.Response(body=body, content_type="application/json", charset="utf-8", headers=_rank_header(finals[0]))


async def _stream(
    request: web.Request, outputs: AsyncGenerator[RequestOutput, None], encoder: StreamEncoder
) -> web.StreamResponse:
    # Nothing is sent before the first output: until then an error is an ordinary HTTP answer, and then the rank is known.
    first = await anext(outputs)
    response = web.StreamResponse(headers=SSE_HEADERS | _rank_header(first))
    try:
        await response.prepare(request)
        if request.transport is not None:
            request.transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        try:
            end = await _write_outputs(request, response, first, outputs, encoder)
        except ClientConnectionResetError:
            raise
        except Exception as error:
            end = _last_words(request, error)
            _close_when_idle(request)
        await response.write_eof(end)
    except ClientConnectionResetError:
        logger.debug("request %s: the client is gone", request[REQUEST_ID])
    return response


async def _write_outputs(
    request: web.Request,
    response: web.StreamResponse,
    first: RequestOutput,
    outputs: AsyncGenerator[RequestOutput, None],
    encoder: StreamEncoder,
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


async def _encode(encoder: StreamEncoder, output: RequestOutput) -> bytes:
    return await asyncio.to_thread(encoder.encode, output) if encoder.is_slow else encoder.encode(output)


def _last_words(request: web.Request, error: Exception) -> bytes:
    """The error event of a stream that had begun."""
    failure = to_failure(error)
    log = logger.exception if failure.is_bug else logger.warning
    log("request %s failed in its stream: %s: %s", request[REQUEST_ID], failure.type, error)
    return failure.event()


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

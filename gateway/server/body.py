"""Reads request bodies within bounds of time and size."""

from __future__ import annotations

import asyncio

from aiohttp import ClientPayloadError, web

from gateway.errors import InvalidRequestError
from gateway.server.content_encoding import decompress
from gateway.server.schema import BodyDecoder, T
from gateway.server.state import STATE


async def read_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """Raises `InvalidRequestError`: 400 for what cannot be understood, 408 for a body that does not come, 413 for one that is
    too large."""
    state = request.app[STATE]
    timeout_s = state.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            body = await request.read()
    except TimeoutError:
        raise InvalidRequestError(f"the body did not arrive within {timeout_s:g} s", status=408, code="body_timeout") from None
    except (ClientPayloadError, web.RequestPayloadError) as error:
        raise InvalidRequestError(f"the body cannot be read: {' '.join(str(error).split())}", code="invalid_body") from None
    if not body:
        raise InvalidRequestError("the request has no body; send a JSON object", code="invalid_json")
    encoding = request.headers.get("Content-Encoding", "").lower()
    if encoding not in ("", "identity"):
        # Up to a tenth of a second, in which every stream would stand still.
        body = await asyncio.to_thread(decompress, body, encoding, state.max_body_bytes)
    return decoder.decode(body)

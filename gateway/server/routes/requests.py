"""A client's second thoughts: its request ends, whichever connection it came by. For all keys there is `/abort_requests`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from gateway.errors import InvalidRequestError
from gateway.server.body import read_body
from gateway.server.json_response import json_response
from gateway.server.schema import BodyDecoder
from gateway.server.state import STATE

routes = web.RouteTableDef()
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "embd-")  # what stands before a request's id in the `id` of its answer


class CancelRequest(Struct, kw_only=True, frozen=True):
    request_ids: Annotated[list[str], Meta(max_length=1024)]  # each asks every front end


_decoder = BodyDecoder(CancelRequest)


@routes.post("/v1/requests/{request_id}/cancel")
@routes.delete("/v1/requests/{request_id}")
async def cancel(request: web.Request) -> web.Response:
    request_id = request.match_info["request_id"]
    if not await _cancel(request, request_id):
        raise InvalidRequestError(
            f"there is no request {request_id!r} of yours under way", "request_id", status=404, code="request_not_found"
        )
    return json_response({"status": "cancelled", "request_id": request_id})


@routes.post("/v1/requests/cancel")
async def cancel_many(request: web.Request) -> web.Response:
    body = await read_body(request, _decoder)
    ids = list(dict.fromkeys(body.request_ids))
    found = await asyncio.gather(*(_cancel(request, request_id) for request_id in ids))
    cancelled = [request_id for request_id, was_there in zip(ids, found, strict=True) if was_there]
    return json_response({"status": "cancelled", "cancelled_request_ids": cancelled})


async def _cancel(request: web.Request, request_id: str) -> bool:
    """Whether there was one. Its id is that of its `X-Request-Id`, or of its answer."""
    state = request.app[STATE]
    engine, tenant = state.require_engine(), state.keys.tenant(request.headers.get("Authorization"))
    candidates = [request_id, *(request_id.removeprefix(p) for p in ANSWER_PREFIXES if request_id.startswith(p))]
    for candidate in candidates:
        if await engine.cancel(candidate, tenant):
            return True
    return False

"""What an operator does to the group: drain a rank, take it back, restart it; another number of ranks.

Each is answered when it is done. A caller that leaves before does not stop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from cores.words import counted
from gateway.config import MAX_RANKS
from gateway.errors import InvalidRequestError
from gateway.operations import DRAIN_TIMEOUT_S, MAX_DRAIN_TIMEOUT_S
from gateway.server.body import read_body
from gateway.server.json_response import json_response
from gateway.server.schema import BodyDecoder
from gateway.server.state import STATE

routes = web.RouteTableDef()
DrainTimeout = Annotated[float, Meta(ge=0, le=MAX_DRAIN_TIMEOUT_S)]  # in seconds


class RestartRequest(Struct, kw_only=True, frozen=True):
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S


class ScaleRequest(Struct, kw_only=True, frozen=True):
    new_data_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S


_restart_decoder = BodyDecoder(RestartRequest)
_scale_decoder = BodyDecoder(ScaleRequest)


@routes.post("/admin/ranks/{rank}/drain")
async def drain(request: web.Request) -> web.Response:
    rank = _rank(request)
    await _carried_out(request.app[STATE].require_engine().drain_rank(rank))
    return _rank_response(request, rank)


@routes.post("/admin/ranks/{rank}/undrain")
async def undrain(request: web.Request) -> web.Response:
    rank = _rank(request)
    await _carried_out(request.app[STATE].require_engine().undrain_rank(rank))
    return _rank_response(request, rank)


@routes.post("/admin/ranks/{rank}/restart")
async def restart(request: web.Request) -> web.Response:
    rank, engine = _rank(request), request.app[STATE].require_engine()
    body = await read_body(request, _restart_decoder) if request.can_read_body else RestartRequest()
    await _carried_out(engine.restart_rank(rank, body.drain_timeout))
    return _rank_response(request, rank)


@routes.post("/scale_elastic_ep")
async def scale_elastic_ep(request: web.Request) -> web.Response:
    engine = request.app[STATE].require_engine()
    body = await read_body(request, _scale_decoder)
    await _carried_out(engine.scale_elastic_ep(body.new_data_parallel_size, body.drain_timeout))
    return json_response({"message": f"Scaled to {counted(body.new_data_parallel_size, 'data parallel engine')}"})


async def _carried_out(operation: Awaitable[None]) -> None:
    await asyncio.shield(operation)


def _rank(request: web.Request) -> int:
    text = request.match_info["rank"]
    # Not `int()`: it takes "1_0", "+1" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequestError(f"rank must be a number of at least 0, got {text!r:.80}", "rank", status=404)
    return int(text)


def _rank_response(request: web.Request, rank: int) -> web.Response:
    """The rank as `/status` shows it now."""
    row = next((row for row in request.app[STATE].status().ranks if row.rank == rank), None)
    return json_response({"rank": rank, "state": row and row.state, "epoch": row and row.epoch})

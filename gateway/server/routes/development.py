"""Sleep, pause, weights, profiles and the like, as in vLLM. They exist only in development mode: whoever can call them can stop
the server, and make an engine read any directory.
"""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from gateway.engine_client import EngineClient
from gateway.errors import InvalidRequestError
from gateway.operations import UTILITY_TIMEOUT_S
from gateway.server.body import read_body
from gateway.server.json_response import json_response
from gateway.server.schema import BodyDecoder
from gateway.server.state import STATE

routes = web.RouteTableDef()
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class CollectiveRpcRequest(Struct, kw_only=True, frozen=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None  # in seconds


class WeightsInfo(Struct, kw_only=True, frozen=True):
    directory: str
    version: int | None = None


class UpdateWeightsRequest(Struct, kw_only=True, frozen=True):
    """The two fields, in vLLM's envelope or without it."""

    update_info: WeightsInfo | None = None
    directory: str | None = None
    version: int | None = None

    @property
    def info(self) -> WeightsInfo:
        if self.update_info is not None:
            return self.update_info
        if self.directory is None:
            raise InvalidRequestError("update_info.directory is required", "update_info")
        return WeightsInfo(directory=self.directory, version=self.version)


class AbortRequestsRequest(Struct, kw_only=True, frozen=True):
    request_ids: list[str]


_rpc_decoder = BodyDecoder(CollectiveRpcRequest)
_weights_decoder = BodyDecoder(UpdateWeightsRequest)
_abort_decoder = BodyDecoder(AbortRequestsRequest)


def _engine(request: web.Request) -> EngineClient:
    return request.app[STATE].require_engine()


# --- sleep and pause --------------------------------------------------------------------------------------------------


@routes.post("/sleep")
async def sleep(request: web.Request) -> web.Response:
    level = request.query.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequestError(f"level must be 1 or 2, got {level!r}", "level")
    await _engine(request).sleep(int(level), request.query.get("mode", "abort"))
    return web.Response()


@routes.post("/wake_up")
async def wake_up(request: web.Request) -> web.Response:
    await _engine(request).wake_up(request.query.getall("tags", None))
    return web.Response()


@routes.get("/is_sleeping")
async def is_sleeping(request: web.Request) -> web.Response:
    return json_response({"is_sleeping": await _engine(request).is_sleeping()})


@routes.post("/pause")
async def pause(request: web.Request) -> web.Response:
    await _engine(request).pause_generation(request.query.get("mode", "abort"), _flag(request, "clear_cache", True))
    return json_response({"status": "paused"})


@routes.post("/resume")
async def resume(request: web.Request) -> web.Response:
    await _engine(request).resume_generation()
    return json_response({"status": "resumed"})


@routes.get("/is_paused")
async def is_paused(request: web.Request) -> web.Response:
    return json_response({"is_paused": await _engine(request).is_paused()})


# --- caches, requests, weights ----------------------------------------------------------------------------------------


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: web.Request) -> web.Response:
    await _engine(request).reset_prefix_cache(_flag(request, "reset_running_requests", False))
    return web.Response()


@routes.post("/reset_mm_cache")
async def reset_mm_cache(request: web.Request) -> web.Response:
    await _engine(request).reset_mm_cache()
    return web.Response()


@routes.post("/reset_encoder_cache")
async def reset_encoder_cache(request: web.Request) -> web.Response:
    await _engine(request).reset_encoder_cache()
    return web.Response()


@routes.post("/abort_requests")
async def abort_requests(request: web.Request) -> web.Response:
    engine, body = _engine(request), await read_body(request, _abort_decoder)
    for request_id in body.request_ids:
        await engine.abort(request_id)
    return web.Response()


@routes.post("/update_weights")
async def update_weights(request: web.Request) -> web.Response:
    engine, info = _engine(request), (await read_body(request, _weights_decoder)).info
    version = await engine.update_weights(info.directory, info.version)
    return json_response({"message": "Weights updated", "version": version})


# --- looking inside ---------------------------------------------------------------------------------------------------


@routes.post("/collective_rpc")
async def collective_rpc(request: web.Request) -> web.Response:
    engine, body = _engine(request), await read_body(request, _rpc_decoder)
    timeout_s = UTILITY_TIMEOUT_S if body.timeout is None else body.timeout
    return json_response({"results": await engine.collective_rpc(body.method, timeout_s, body.args, body.kwargs)})


@routes.post("/start_profile")
async def start_profile(request: web.Request) -> web.Response:
    await _engine(request).start_profile()
    return web.Response()


@routes.post("/stop_profile")
async def stop_profile(request: web.Request) -> web.Response:
    return json_response({"files": await _engine(request).stop_profile()})


def _flag(request: web.Request, name: str, default: bool) -> bool:
    text = request.query.get(name)
    if text is None:
        return default
    if text.lower() not in BOOLEANS:
        raise InvalidRequestError(f"{name} must be true or false, got {text!r}", name)
    return BOOLEANS[text.lower()]

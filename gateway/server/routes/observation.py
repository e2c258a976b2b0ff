"""Probes, metrics and the status document: what others watch the server with. None of it waits for an engine."""

from __future__ import annotations

from aiohttp import web

from gateway.server.json_response import json_response
from gateway.server.state import STATE, ServerState
from gateway.version import __version__

routes = web.RouteTableDef()
WELCOMING_STATES = frozenset({"ready", "degraded"})


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    return web.Response(status=200 if can_serve(request.app[STATE]) else 503)


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    reason = why_not_ready(request.app[STATE])
    return web.Response() if reason is None else web.Response(status=503, text=reason + "\n")


@routes.get("/live")
async def live(_request: web.Request) -> web.Response:
    return web.Response()


@routes.get("/status")
async def status(request: web.Request) -> web.Response:
    return json_response(request.app[STATE].status().to_document())


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    own = state.own_report()
    exposition = state.exposition(own)
    await state.publish(own)  # first: should we die now, nobody shows less than what is shown here
    return web.Response(body=exposition, headers={"Content-Type": state.metrics.content_type})


@routes.get("/version")
async def version(_request: web.Request) -> web.Response:
    return json_response({"version": __version__})


@routes.get("/load")
async def load(request: web.Request) -> web.Response:
    return json_response({"server_load": request.app[STATE].server_load()})


def can_serve(state: ServerState) -> bool:
    """At least one rank takes requests, or would if it were not told to stand still."""
    engine = state.engine
    return engine is not None and not engine.errored and engine.status().num_healthy_ranks > 0


def why_not_ready(state: ServerState) -> str | None:
    """None while new requests are welcome."""
    engine = state.engine
    if engine is None:
        return "starting"
    if state.is_leaving:
        return "draining"
    if not can_serve(state):
        return "no rank can serve"
    status = engine.status()
    if status.state not in WELCOMING_STATES:
        return status.state
    refusal = engine.refusal()
    return None if refusal is None else str(refusal)

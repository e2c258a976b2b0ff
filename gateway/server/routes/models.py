"""`GET /v1/models` and `GET /v1/models/ID`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.server.json_response import json_response
from gateway.server.state import STATE, ServerState

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_response({"object": "list", "data": [_card(state, name) for name in state.served_model_names]})


@routes.get("/v1/models/{name:.+}")
async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_response(_card(state, state.resolve_model(request.match_info["name"])))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    model = state.require_engine().model_config
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "gateway",
        "root": model.path,
        "parent": None,
        "max_model_len": model.max_model_len,
    }

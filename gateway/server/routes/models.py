"""`GET /v1/models` and `GET /v1/models/ID`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.lora_store import LoraAdapter
from gateway.server.json_response import json_response
from gateway.server.state import STATE, ServerState

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    adapters = await state.require_engine().list_loras()
    cards = [_card(state, name) for name in state.served_model_names] + [_adapter_card(state, adapter) for adapter in adapters]
    return json_response({"object": "list", "data": cards})


@routes.get("/v1/models/{name:.+}")
async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    name = state.resolve_model(request.match_info["name"])
    adapter = None if name in state.served_model_names else state.require_engine().find_lora(name)
    return json_response(_card(state, name) if adapter is None else _adapter_card(state, adapter))


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
        "supported_tasks": model.supported_tasks,
    }


def _adapter_card(state: ServerState, adapter: LoraAdapter) -> dict[str, Any]:
    return {**_card(state, adapter.name), "root": adapter.path, "parent": state.served_model_names[0]}

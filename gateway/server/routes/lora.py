"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as in vLLM: adapters come and go while the server runs."""

from __future__ import annotations

from aiohttp import web

from gateway.server.body import read_body
from gateway.server.schema import BodyDecoder, LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from gateway.server.state import STATE

routes = web.RouteTableDef()
_load_decoder = BodyDecoder(LoadLoraAdapterRequest)
_unload_decoder = BodyDecoder(UnloadLoraAdapterRequest)


@routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: web.Request) -> web.Response:
    engine = request.app[STATE].require_engine()
    body = await read_body(request, _load_decoder)
    await engine.add_lora(body.lora_name, body.lora_path, load_inplace=bool(body.load_inplace))
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: web.Request) -> web.Response:
    engine = request.app[STATE].require_engine()
    body = await read_body(request, _unload_decoder)
    await engine.remove_lora(body.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

"""`POST /v1/responses`: stateless, a chat answer in the Responses API's words."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from aiohttp import web

from cores.sampling_params import SamplingParams
from gateway.server.body import read_body
from gateway.server.generation import Routing, generate
from gateway.server.prompts import chat_prompt
from gateway.server.responding import write_stream, write_whole
from gateway.server.responses.documents import ResponseHead, whole_response
from gateway.server.responses.events import ResponseEncoder
from gateway.server.responses.schema import ResponsesRequest
from gateway.server.responses.to_chat import own_field_names, to_chat_request
from gateway.server.sampling import to_sampling_params
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.server.state import REQUEST_ID, STATE

routes = web.RouteTableDef()
_decoder = BodyDecoder(ResponsesRequest)


@routes.post("/v1/responses")
async def create_response(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, _decoder)
    chat = to_chat_request(body)
    with own_field_names():
        return await _respond(request, body, chat)


async def _respond(request: web.Request, body: ResponsesRequest, chat: ChatCompletionRequest) -> web.StreamResponse:
    state, request_id = request.app[STATE], request[REQUEST_ID]
    engine = state.require_engine()
    model = state.resolve_model(body.model)
    engine.model_config.check_task("generate")
    params = _sampling_params(chat)
    routing = Routing.from_request(request, request_id)
    # Before the work of rendering and tokenizing, which an overloaded server cannot afford for nothing.
    with engine.preparing(params.n):
        prompt = await chat_prompt(chat, engine)
    head = ResponseHead(request_id, model, int(time.time()), len(prompt.token_ids), body, params)
    outputs = generate(
        engine,
        [prompt],
        params,
        routing,
        lora_request=state.lora_of(model),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    async with aclosing(outputs):
        if body.stream:
            return await write_stream(request, outputs, ResponseEncoder(head))
        return await write_whole(outputs, partial(whole_response, head))


def _sampling_params(chat: ChatCompletionRequest) -> SamplingParams:
    params = to_sampling_params(chat)
    if chat.response_format is None or params.structured_outputs is None:
        return params
    # What is wrong with a schema is found out by its compiler, which begins its words with the field's name.
    return replace(params, structured_outputs=replace(params.structured_outputs, param="text.format"))

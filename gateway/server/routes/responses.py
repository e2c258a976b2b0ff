"""`POST /v1/responses`: stateless, a chat answer in the Responses API's words."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from aiohttp import web

from cores.sampling_params import SamplingParams
from gateway.engine_client import EngineClient
from gateway.errors import InvalidRequestError
from gateway.sampling_defaults import SamplingDefaults
from gateway.server.body import read_body
from gateway.server.chat_message import AnswerForm
from gateway.server.generation import Routing, generate
from gateway.server.prompts import chat_prompt
from gateway.server.reasoning import let_pass, reasoning_in_front
from gateway.server.responding import write_stream, write_whole
from gateway.server.responses.documents import ResponseHead, whole_response
from gateway.server.responses.events import ResponseEncoder
from gateway.server.responses.schema import ResponsesRequest
from gateway.server.responses.to_chat import own_field_names, to_chat_request
from gateway.server.sampling import to_sampling_params
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.server.state import REQUEST_ID, STATE
from gateway.server.tools import answer_form, check_tools

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
    check_tools(chat, state.config.server.tool_call_parser)
    params = _sampling_params(chat, engine.model_config.sampling_defaults)
    routing = Routing.from_request(request, request_id)
    # Before the work of rendering and tokenizing, which an overloaded server cannot afford for nothing.
    with engine.preparing(params.n):
        prompt = await chat_prompt(chat, engine)
    config = state.config.server
    reasoning = reasoning_in_front(chat, config.reasoning_parser, prompt.text)
    params = let_pass(reasoning, params)
    form = answer_form(chat, config.tool_call_parser, reasoning, has_grammar=params.structured_outputs is not None)
    _check_logprobs(body, params, form)
    head = ResponseHead(
        request_id,
        model,
        created_at=int(time.time()),
        num_prompt_tokens=len(prompt.token_ids),
        request=body,
        params=params,
        form=form,
        reasoning_end_id=None if reasoning is None else _token_id(engine, reasoning.end),
    )
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


def _check_logprobs(body: ResponsesRequest, params: SamplingParams, form: AnswerForm | None) -> None:
    if form is not None and params.logprobs is not None:
        raise InvalidRequestError(
            "log-probabilities are not available with tools or a reasoning parser: they are of an answer's text before it is"
            " taken apart, and /v1/chat/completions shows them",
            "top_logprobs" if body.top_logprobs else "include",
        )


def _token_id(engine: EngineClient, marker: str) -> int | None:
    """None where it is not one token."""
    token_ids = engine.renderer.tokenizer.encode(marker, add_special_tokens=False)
    return token_ids[0] if len(token_ids) == 1 else None


def _sampling_params(chat: ChatCompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    params = to_sampling_params(chat, defaults)
    wanted = params.structured_outputs
    if wanted is None or wanted.param != "response_format":
        return params
    # What is wrong with a schema is found out by its compiler, which begins its words with the field's name.
    return replace(params, structured_outputs=replace(wanted, param="text.format"))

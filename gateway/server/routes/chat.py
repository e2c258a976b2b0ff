"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from gateway.server.answers import CHAT, Answer
from gateway.server.body import read_body
from gateway.server.generation import Routing, generate
from gateway.server.prompts import chat_prompt
from gateway.server.reasoning import let_pass, reasoning_in_front
from gateway.server.responding import respond
from gateway.server.sampling import to_sampling_params
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.server.state import REQUEST_ID, STATE
from gateway.server.tools import answer_form, check_tools
from gateway.server.usage import shows_usage

routes = web.RouteTableDef()
_decoder = BodyDecoder(ChatCompletionRequest)


@routes.post("/v1/chat/completions")
async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    state, request_id = request.app[STATE], request[REQUEST_ID]
    engine = state.require_engine()
    body = await read_body(request, _decoder)
    model = state.resolve_model(body.model)
    engine.model_config.check_task("generate")
    check_tools(body, state.config.server.tool_call_parser)
    params = to_sampling_params(body, engine.model_config.sampling_defaults)
    routing = Routing.from_request(request, request_id)
    # Before the work of rendering and tokenizing, which an overloaded server cannot afford for nothing.
    with engine.preparing(params.n):
        prompt = await chat_prompt(body, engine)
    reasoning = reasoning_in_front(body, state.config.server.reasoning_parser, prompt.text)
    params = let_pass(reasoning, params)
    has_grammar = params.structured_outputs is not None
    form = answer_form(body, state.config.server.tool_call_parser, reasoning, has_grammar=has_grammar)
    is_forced = state.config.server.enable_force_include_usage
    include_usage, continuous_usage = shows_usage(body.stream_options, is_forced=is_forced)
    answer = Answer(
        id=f"chatcmpl-{request_id}",
        model=model,
        created=int(time.time()),
        prompt_token_ids=(prompt.token_ids,),
        n=params.n,
        echo=_echo(body),
        role=_role(body),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        form=form,
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
    return await respond(request, CHAT, answer, outputs, stream=bool(body.stream))


def _role(body: ChatCompletionRequest) -> str:
    """Who speaks: a continued message keeps its role."""
    return body.messages[-1]["role"] if body.continue_final_message else "assistant"


def _echo(body: ChatCompletionRequest) -> tuple[str, ...]:
    """With `echo`, an answer of the last message's role begins with that message."""
    last: dict[str, Any] = body.messages[-1]
    if body.echo and last["role"] == _role(body) and isinstance(last.get("content"), str):
        return (last["content"],)
    return ()

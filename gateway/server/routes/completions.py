"""`POST /v1/completions`."""

from __future__ import annotations

import time

from aiohttp import web

from gateway.engine_client import EngineClient, TokenizedPrompt
from gateway.server.answers import COMPLETION, Answer
from gateway.server.body import read_body
from gateway.server.generation import Routing, generate, without_output
from gateway.server.prompts import check_num_sequences, completion_prompts, split_prompts
from gateway.server.responding import respond
from gateway.server.sampling import is_prompt_alone, to_sampling_params
from gateway.server.schema import BodyDecoder, CompletionRequest
from gateway.server.state import REQUEST_ID, STATE
from gateway.server.usage import shows_usage

routes = web.RouteTableDef()
_decoder = BodyDecoder(CompletionRequest)


@routes.post("/v1/completions")
async def create_completion(request: web.Request) -> web.StreamResponse:
    state, request_id = request.app[STATE], request[REQUEST_ID]
    engine = state.require_engine()
    body = await read_body(request, _decoder)
    model = state.resolve_model(body.model)
    engine.model_config.check_task("generate")
    params = to_sampling_params(body, engine.model_config.sampling_defaults)
    routing = Routing.from_request(request, request_id)
    with engine.preparing(check_num_sequences(len(split_prompts(body.prompt)), params.n)):
        prompts = await completion_prompts(body, engine)
    is_forced = state.config.server.enable_force_include_usage
    include_usage, continuous_usage = shows_usage(body.stream_options, is_forced=is_forced)
    answer = Answer(
        id=f"cmpl-{request_id}",
        model=model,
        created=int(time.time()),
        prompt_token_ids=[prompt.token_ids for prompt in prompts],
        n=params.n,
        echo=tuple(_text(prompt, engine) for prompt in prompts) if body.echo else (),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        echo_logprobs=body.logprobs if body.echo else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    outputs = generate(
        engine,
        prompts,
        params,
        routing,
        lora_request=state.lora_of(model),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    if is_prompt_alone(body):
        outputs = without_output(outputs)
    return await respond(request, COMPLETION, answer, outputs, stream=bool(body.stream))


def _text(prompt: TokenizedPrompt, engine: EngineClient) -> str:
    if prompt.text is not None:
        return prompt.text
    return engine.renderer.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)

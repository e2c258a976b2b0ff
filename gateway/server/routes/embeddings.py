"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from cores.pooling_params import PoolingParams
from gateway.engine_client import EngineClient, TokenizedPrompt
from gateway.errors import InvalidRequestError
from gateway.outputs import PoolingRequestOutput
from gateway.server.body import read_body
from gateway.server.generation import Routing
from gateway.server.json_response import json_response
from gateway.server.prompts import MAX_SEQUENCES, split_prompts, tokenized_prompts
from gateway.server.responding import RANK_HEADER
from gateway.server.schema import BodyDecoder, EmbeddingRequest
from gateway.server.state import REQUEST_ID, STATE

routes = web.RouteTableDef()
_decoder = BodyDecoder(EmbeddingRequest)
FORMATS = ("float", "base64")


@routes.post("/v1/embeddings")
async def create_embeddings(request: web.Request) -> web.Response:
    state, request_id = request.app[STATE], request[REQUEST_ID]
    engine = state.require_engine()
    body = await read_body(request, _decoder)
    model = state.resolve_model(body.model)
    engine.model_config.check_task("embed")
    encoding = _encoding(body)
    routing = Routing.from_request(request, request_id)
    inputs = split_prompts(body.input, "input")
    if len(inputs) > MAX_SEQUENCES:
        raise InvalidRequestError(f"input: at most {MAX_SEQUENCES} inputs are allowed, got {len(inputs)}", "input")
    with engine.preparing(len(inputs)):
        prompts = await tokenized_prompts(inputs, engine, body.add_special_tokens is not False)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
    outputs = await _encode_all(engine, prompts, params, routing, body.priority or 0)
    headers = {} if outputs[0].rank is None else {RANK_HEADER: str(outputs[0].rank)}
    return json_response(_document(f"embd-{request_id}", model, outputs, encoding), headers=headers)


def _encoding(body: EmbeddingRequest) -> str:
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("truncate_prompt_tokens is not supported; shorten the input", "truncate_prompt_tokens")
    if body.encoding_format not in (None, *FORMATS):
        raise InvalidRequestError(
            f"encoding_format must be one of {', '.join(FORMATS)}, got {body.encoding_format!r}", "encoding_format"
        )
    return body.encoding_format or "float"


async def _encode_all(
    engine: EngineClient, prompts: Sequence[TokenizedPrompt], params: PoolingParams, routing: Routing, priority: int
) -> list[PoolingRequestOutput]:
    """In order. The first failure ends the others, and so does a client that leaves."""
    names = [f"input[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["input"]
    tasks = [
        asyncio.ensure_future(_encode(engine, name, prompt, params, routing, priority))
        for name, prompt in zip(names, prompts, strict=True)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _encode(
    engine: EngineClient, name: str, prompt: TokenizedPrompt, params: PoolingParams, routing: Routing, priority: int
) -> PoolingRequestOutput:
    outputs = engine.encode(
        prompt.token_ids,
        params,
        routing.request_id,
        trace_headers=routing.trace_headers,
        priority=priority,
        data_parallel_rank=routing.data_parallel_rank,
        session_id=routing.session_id,
        tenant=routing.tenant,
        prompt_text=prompt.text,
        timeout_s=routing.timeout_s,
    )
    try:
        async with aclosing(outputs):
            return await anext(outputs)
    except InvalidRequestError as error:
        if error.param != "prompt":
            raise
        raise InvalidRequestError(f"{name}: {error}", "input", status=error.status, code=error.code) from error


def _document(answer_id: str, model: str, outputs: Sequence[PoolingRequestOutput], encoding: str) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {
                "object": "embedding",
                "index": i,
                "embedding": output.values if encoding == "float" else base64.b64encode(output.vector).decode(),
            }
            for i, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }

"""`POST /tokenize` and `POST /detokenize`, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from gateway.errors import InvalidRequestError
from gateway.server.body import read_body
from gateway.server.json_response import json_response
from gateway.server.prompts import chat_prompt
from gateway.server.schema import BodyDecoder, DetokenizeRequest, TokenizeRequest
from gateway.server.state import STATE

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

routes = web.RouteTableDef()
_tokenize_decoder = BodyDecoder(TokenizeRequest)
_detokenize_decoder = BodyDecoder(DetokenizeRequest)


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.require_engine()
    body = await read_body(request, _tokenize_decoder)
    state.resolve_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("exactly one of prompt and messages is required", "prompt")
    ids: Sequence[int]
    if body.prompt is not None:
        engine.input_processor.check_text(body.prompt)
        ids = await engine.renderer.encode_async(body.prompt, body.add_special_tokens is not False)
    else:
        ids = (await chat_prompt(body, engine)).token_ids
    tokenizer = engine.renderer.tokenizer
    return json_response(
        {
            "count": len(ids),
            "max_model_len": engine.model_config.max_model_len,
            "tokens": ids,
            "token_strs": [_token_text(tokenizer, token_id) for token_id in ids] if body.return_token_strs else None,
        }
    )


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.require_engine()
    body = await read_body(request, _detokenize_decoder)
    state.resolve_model(body.model)
    max_model_len, vocab_size = engine.model_config.max_model_len, engine.model_config.vocab_size
    if len(body.tokens) > max_model_len:
        raise InvalidRequestError(
            f"tokens takes at most {max_model_len} ids, the model's context length, got {len(body.tokens)}", "tokens"
        )
    if too_large := [token_id for token_id in body.tokens if token_id >= vocab_size]:
        raise InvalidRequestError(f"tokens must be below the vocabulary's size {vocab_size}, got {too_large[0]}", "tokens")
    return json_response({"prompt": engine.renderer.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")

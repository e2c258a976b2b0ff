"""From the prompt part of a body to token ids: chat messages through the model's template, text through its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.engine_client import EngineClient, TokenizedPrompt
from gateway.errors import InvalidRequestError
from gateway.renderer import Renderer
from gateway.server.schema import ChatCompletionRequest, CompletionRequest, TokenizeRequest

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_SEQUENCES = 2048  # of one request: a body of 60 kB can ask for a million, and none of them could be refused one by one


def check_num_sequences(num_prompts: int, n: int) -> int:
    """How many sequences a request makes. Raises `InvalidRequestError` for too many."""
    num_sequences = num_prompts * n
    if num_sequences > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"prompt: {num_prompts} prompts with n = {n} make {num_sequences} sequences; at most {MAX_SEQUENCES} are allowed",
            "prompt",
        )
    return num_sequences


async def completion_prompts(request: CompletionRequest, engine: EngineClient) -> list[TokenizedPrompt]:
    """One or more prompts, in order. Raises `InvalidRequestError`."""
    return await tokenized_prompts(split_prompts(request.prompt), engine, request.add_special_tokens is not False)


async def tokenized_prompts(
    texts_or_ids: Sequence[str | list[int]], engine: EngineClient, add_special_tokens: bool
) -> list[TokenizedPrompt]:
    prompts = []
    for prompt in texts_or_ids:
        if isinstance(prompt, str):
            prompts.append(await _tokenize(engine, prompt, add_special_tokens))
            await asyncio.sleep(0)  # of many short ones none is long enough for a thread, but all together are
        else:
            prompts.append(TokenizedPrompt(prompt, None))
    return prompts


def split_prompts(prompt: str | list[Any], param: str = "prompt") -> list[str | list[int]]:
    """Text, a list of texts, token ids, or a list of token id lists, as a list of prompts. `param` is the field's name."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        got = "an empty list" if not prompt else "a mixed list"
        raise InvalidRequestError(
            f"{param} must be text, a list of texts, token ids, or a list of token id lists, got {got}", param
        )
    if [] in prompt:
        raise InvalidRequestError(f"{param}[{prompt.index([])}] must not be empty", param)
    return prompt


def render_messages(request: ChatCompletionRequest | TokenizeRequest, renderer: Renderer) -> str:
    """The whole prompt text. Raises `InvalidRequestError`."""
    continue_final_message = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        # Both default to their usual value; saying only `continue_final_message` is enough.
        add_generation_prompt = not continue_final_message
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
        )
    return renderer.render_chat(
        request.messages or [],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=request.tools,
        chat_template_kwargs=_template_kwargs(request),
    )


def _template_kwargs(request: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any] | None:
    """How much the model is to reason is for its template to say, which may know of a word or of a switch."""
    effort = request.reasoning_effort
    if effort is None:
        return request.chat_template_kwargs
    if effort not in REASONING_EFFORTS:
        raise InvalidRequestError(
            f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}, got {effort!r:.80}", "reasoning_effort"
        )
    told: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        told["enable_thinking"] = False
    return told | (request.chat_template_kwargs or {})


async def chat_prompt(request: ChatCompletionRequest | TokenizeRequest, engine: EngineClient) -> TokenizedPrompt:
    """Raises `InvalidRequestError`."""
    text = render_messages(request, engine.renderer)
    # The template writes the special tokens itself.
    return await _tokenize(engine, text, bool(request.add_special_tokens))


async def _tokenize(engine: EngineClient, text: str, add_special_tokens: bool) -> TokenizedPrompt:
    engine.input_processor.check_text(text)
    return TokenizedPrompt(await engine.renderer.encode_async(text, add_special_tokens), text)

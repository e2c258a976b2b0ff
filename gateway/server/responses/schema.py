"""The body of `POST /v1/responses`. Knows its shape only; what makes sense is decided in `to_chat`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gateway.server.schema import Int, Positive, Seed, StructuredOutputsFields, TokenId


class TextFormat(Struct, frozen=True, omit_defaults=True):
    """Flat, where chat wraps a schema once more."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFields(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningFields(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Struct, kw_only=True, frozen=True):
    """OpenAI's fields, then vLLM's."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    text: TextFields | None = None
    metadata: dict[str, str] | None = None
    # Told to whoever runs the model, or about what is billed: echoed, and without effect here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: str | None = None
    reasoning: ReasoningFields | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    # vLLM's.
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None

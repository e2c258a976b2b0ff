"""The body of `POST /v1/responses`. Knows its shape only; what makes sense is decided in `to_chat`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gateway.server.schema import Int, Positive, SamplingRequest


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


class ResponsesRequest(SamplingRequest, kw_only=True, frozen=True):
    """OpenAI's fields, besides those that all routes have."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Int | None = None
    include: list[str] | None = None
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
    chat_template_kwargs: dict[str, Any] | None = None

"""From the prompt part of a body to token ids: chat messages through the model's template, text through its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.errors import InvalidRequestError
from gateway.server.schema import ChatCompletionRequest, CompletionRequest, TokenizeRequest

if TYPE_CHECKING:
    from gateway.renderer import Renderer


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: Sequence[int]
    text: str | None  # None: it came as token ids


async def completion_prompts(request: CompletionRequest, renderer: Renderer) -> list[TokenizedPrompt]:
    """One or more prompts, in order. Raises `InvalidRequestError`."""
    add_special_tokens = request.add_special_tokens is not False
    prompts = []
    for prompt in split_prompts(request.prompt):
        if isinstance(prompt, str):
            prompts.append(TokenizedPrompt(await renderer.encode_async(prompt, add_special_tokens), prompt))
        else:
            prompts.append(TokenizedPrompt(prompt, None))
    return prompts


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Text, a list of texts, token ids, or a list of token id lists, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        got = "an empty list" if not prompt else "a mixed list"
        raise InvalidRequestError(
            f"prompt must be text, a list of texts, token ids, or a list of token id lists, got {got}", "prompt"
        )
    if [] in prompt:
        raise InvalidRequestError(f"prompt[{prompt.index([])}] must not be empty", "prompt")
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
        normalise_messages(request.messages or []),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
    )


async def chat_prompt(request: ChatCompletionRequest | TokenizeRequest, renderer: Renderer) -> TokenizedPrompt:
    """Raises `InvalidRequestError`."""
    text = render_messages(request, renderer)
    # The template writes the special tokens itself.
    return TokenizedPrompt(await renderer.encode_async(text, bool(request.add_special_tokens)), text)


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content only. Raises `InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    return [_normalise_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _normalise_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a name such as 'user', got {role!r}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        return {**message, "content": "\n".join(texts)}
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be text or a list of parts, got {content!r}", "messages")
    if content is None and role in ("system", "developer", "user"):
        raise InvalidRequestError(f"{where}.content is required for the role {role!r}", "messages")
    return message if content is not None else {**message, "content": ""}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind in ("text", "input_text") else part.get("refusal") if kind == "refusal" else None
    if not isinstance(text, str):
        what = f"type {kind!r}" if kind is not None else repr(part)
        raise InvalidRequestError(f"{where}: {what} is not supported; allowed: {{'type': 'text', 'text': …}}", "messages")
    return text

"""From the body of `POST /v1/responses` to the chat request that it means. What cannot be served is refused by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from cores.sampling_params import InvalidParameterError
from gateway.chat_messages import MAX_MESSAGES, short
from gateway.errors import InvalidRequestError
from gateway.server.responses.input_items import to_messages
from gateway.server.responses.schema import ResponsesRequest, TextFormat
from gateway.server.schema import ChatCompletionRequest, JsonSchemaFormat, ResponseFormat, SamplingRequest

LOGPROBS = "message.output_text.logprobs"
# What agents ask for to be able to send reasoning back. Ours is never encrypted: it comes and goes as text.
ENCRYPTED = "reasoning.encrypted_content"
CHOICES = ("none", "auto", "required")
# What chat calls otherwise, where an error may name it.
_RENAMED = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_OLD_NAME = re.compile(r"\b(?:max_completion_tokens|max_tokens|response_format|reasoning_effort)\b|(?<=\])\.function(?=\.)")


def to_chat_request(request: ResponsesRequest) -> ChatCompletionRequest:
    """Raises `InvalidRequestError`."""
    _refuse_unsupported(request)
    wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    return ChatCompletionRequest(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        response_format=_response_format(request),
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        tools=_tools(request),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        **{name: getattr(request, name) for name in SamplingRequest.__struct_fields__},
    )


@contextmanager
def own_field_names() -> Iterator[None]:
    """An error about a field of the chat request names the field that it came from."""
    try:
        yield
    except InvalidParameterError as error:
        raise InvalidRequestError(_renamed_in(str(error)), _RENAMED.get(error.param, error.param)) from error
    except InvalidRequestError as error:
        param = None if error.param is None else _RENAMED.get(error.param, error.param)
        raise InvalidRequestError(_renamed_in(str(error)), param, status=error.status, code=error.code) from error


def _renamed_in(message: str) -> str:
    return _OLD_NAME.sub(lambda name: _RENAMED.get(name[0], ""), message)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    first = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*first, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("input must not be empty", "input")
    if len(request.input) >= MAX_MESSAGES:
        raise InvalidRequestError(f"input takes less than {MAX_MESSAGES} items, got {len(request.input)}", "input")
    messages = to_messages(request.input)
    if not first and not messages:
        raise InvalidRequestError("input has no item that says anything", "input")
    return first + messages


def _tools(request: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Flat here, wrapped in chat."""
    return None if not request.tools else [_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools)]


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        shown = f"{kind!r:.80}" if isinstance(kind, str) else "none"
        raise InvalidRequestError(f"{where}.type must be 'function', got {shown}: there are no built-in tools here", "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or (isinstance(choice, str) and choice in CHOICES):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    kind = choice if isinstance(choice, str) else choice.get("type")
    return _refuse("tool_choice", kind, f"{', '.join(map(repr, CHOICES))}, {{'type': 'function', 'name': …}}")


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text else None
    if wanted is None or wanted.type == "text":
        return None
    if request.structured_outputs is not None:
        raise InvalidRequestError("text.format and structured_outputs exclude each other", "structured_outputs")
    return ResponseFormat(wanted.type, _json_schema(wanted))


def _json_schema(wanted: TextFormat) -> JsonSchemaFormat | None:
    if wanted.type == "json_object":
        return None
    if wanted.type != "json_schema":
        raise InvalidRequestError(
            f"text.format.type must be one of text, json_object, json_schema, got {wanted.type!r}", "text.format"
        )
    if wanted.schema is None:
        raise InvalidRequestError("text.format.schema is required for the type 'json_schema'", "text.format")
    return JsonSchemaFormat(wanted.schema, wanted.name, wanted.description, wanted.strict)


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise InvalidRequestError(f"{name} is not supported: responses are not kept; send the whole input", name)
    if request.background:
        raise InvalidRequestError("background must be false: responses are not kept", "background")
    if request.prompt is not None:
        raise InvalidRequestError("prompt is not supported: there are no stored prompts; use input", "prompt")
    if request.truncation not in (None, "disabled"):
        _refuse("truncation", request.truncation, "'disabled'")
    for item in request.include or ():
        if item not in (LOGPROBS, ENCRYPTED):
            _refuse("include", item, f"{LOGPROBS!r}, {ENCRYPTED!r}")
    if request.text and request.text.verbosity not in (None, "medium"):
        _refuse("text.verbosity", request.text.verbosity, "'medium'")
    if request.reasoning:
        for name in ("summary", "generate_summary"):
            if (value := getattr(request.reasoning, name)) is not None:
                _refuse(f"reasoning.{name}", value, "null")


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise InvalidRequestError(f"{name} {short(value)} is not supported; allowed: {allowed}", name)

"""From the body of `POST /v1/responses` to the chat request that it means. What cannot be served is refused by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from cores.sampling_params import InvalidParameterError
from gateway.chat_messages import MAX_MESSAGES, content_text
from gateway.errors import InvalidRequestError
from gateway.server.responses.schema import ResponsesRequest, TextFormat
from gateway.server.schema import ChatCompletionRequest, JsonSchemaFormat, ResponseFormat, SamplingRequest

LOGPROBS = "message.output_text.logprobs"
# Templates know "system" for what OpenAI calls "developer".
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# What chat calls otherwise, where an error may name it.
_RENAMED = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_OLD_NAME = re.compile(r"\b(?:max_completion_tokens|max_tokens|response_format)\b")


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
    return _OLD_NAME.sub(lambda name: _RENAMED[name[0]], message)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    first = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*first, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("input must not be empty", "input")
    if len(request.input) >= MAX_MESSAGES:
        raise InvalidRequestError(f"input takes less than {MAX_MESSAGES} items, got {len(request.input)}", "input")
    return first + [_message(f"input[{i}]", item) for i, item in enumerate(request.input)]


def _message(where: str, item: dict[str, Any]) -> dict[str, Any]:
    kind, role = item.get("type", "message"), item.get("role")
    if kind != "message":
        raise InvalidRequestError(f"{where}.type must be 'message', got {kind!r:.80}: no other items are supported", "input")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.80}", "input")
    if item.get("content") is None:
        raise InvalidRequestError(f"{where}.content is required", "input")
    return {"role": _ROLES[role], "content": content_text(f"{where}.content", item["content"])}


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
    if request.tools:
        raise InvalidRequestError("tools are not supported yet; leave them out", "tools")
    if request.tool_choice not in (None, "none", "auto"):
        _refuse("tool_choice", request.tool_choice, "'none', 'auto'")
    if request.truncation not in (None, "disabled"):
        _refuse("truncation", request.truncation, "'disabled'")
    for item in request.include or ():
        if item != LOGPROBS:
            _refuse("include", item, repr(LOGPROBS))
    if request.text and request.text.verbosity not in (None, "medium"):
        _refuse("text.verbosity", request.text.verbosity, "'medium'")
    if request.reasoning:
        for name in request.reasoning.__struct_fields__:
            if (value := getattr(request.reasoning, name)) is not None:
                _refuse(f"reasoning.{name}", value, "null")


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise InvalidRequestError(f"{name} {value!r:.80} is not supported; allowed: {allowed}", name)

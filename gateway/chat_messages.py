"""Chat messages as clients send them, to messages as chat templates expect them. Every complaint names the place."""

from __future__ import annotations

import json
from typing import Any

from gateway.errors import InvalidRequestError

MAX_MESSAGES = 16_384  # a template takes 12 µs for each, on the loop; a chat that long fits into no model
_MEDIA = {
    "image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio_url": "audio",
    "video_url": "video", "file": "file", "input_file": "file",
}  # fmt: skip
_TEXT_FIELD = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "reasoning_text": "text",
    "summary_text": "text",
}  # fmt: skip


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies with a text `content` each and tool calls' arguments parsed. Raises `InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages takes at most {MAX_MESSAGES} messages, got {len(messages)}", "messages")
    return [_normalise_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _normalise_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object with a role and a content, got {short(message)}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a name such as 'user', got {short(role)}", "messages")
    normal = message | {"content": content_text(f"{where}.content", message.get("content"))}
    if tool_calls := message.get("tool_calls"):
        normal["tool_calls"] = _normalise_tool_calls(f"{where}.tool_calls", tool_calls)
    return normal


def content_text(where: str, content: Any) -> str:
    """Of one message. `where` is its place in the body. Raises `InvalidRequestError`."""
    if content is None:
        return ""  # templates join it with text
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts, got {short(content)}", _field(where))
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object with a type, got {short(part)}", _field(where))
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_FIELD:
        what = f"{_MEDIA[kind]} input" if isinstance(kind, str) and kind in _MEDIA else f"type {short(kind)}"
        raise InvalidRequestError(f"{where}: {what} is not supported; only text is", _field(where))
    text = part.get(_TEXT_FIELD[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{_TEXT_FIELD[kind]} must be text, got {short(text)}", _field(where))
    return text


def _normalise_tool_calls(where: str, tool_calls: Any) -> list[dict[str, Any]]:
    """OpenAI sends arguments as JSON text; templates want the object."""
    if not isinstance(tool_calls, list):
        raise InvalidRequestError(f"{where} must be a list, got {short(tool_calls)}", "messages")
    normal = []
    for i, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequestError(f"{where}[{i}] must be an object with a function, got {short(call)}", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError):
                raise InvalidRequestError(
                    f"{where}[{i}].function.arguments must be JSON, got {short(arguments)}", "messages"
                ) from None
        normal.append(call | {"function": function | {"arguments": arguments}})
    return normal


def _field(where: str) -> str:
    return where.partition("[")[0]


def short(value: Any) -> str:
    """For a message: clients send whole books in the wrong place, or lists of any depth."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} of great depth"
    return text if len(text) <= 80 else text[:77] + "..."

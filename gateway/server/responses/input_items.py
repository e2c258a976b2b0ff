"""From the items of `input` to the messages of a chat. Pure.

What the model said in one turn (reasoning, text, calls) comes as an item each, and is one message to a chat template.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.chat_messages import content_text, short
from gateway.errors import InvalidRequestError

# Templates know "system" for what OpenAI calls "developer".
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

Message = dict[str, Any]


def to_messages(items: list[dict[str, Any]]) -> list[Message]:
    """Raises `InvalidRequestError`."""
    messages: list[Message] = []
    for i, item in enumerate(items):
        message = _message(f"input[{i}]", item)
        if message is not None and not (messages and _join(messages[-1], message)):
            messages.append(message)
    return messages


def _message(where: str, item: dict[str, Any]) -> Message | None:
    match kind := item.get("type", "message"):
        case "message":
            return _said(where, item)
        case "reasoning":
            return _reasoning(where, item)
        case "function_call":
            return _call(where, item)
        case "function_call_output":
            call_id, output = _text(where, item, "call_id"), _required(where, item, "output")
            return {"role": "tool", "tool_call_id": call_id, "content": content_text(f"{where}.output", output)}
    raise InvalidRequestError(
        f"{where}.type must be 'message', 'reasoning', 'function_call' or 'function_call_output', got {short(kind)}", "input"
    )


def _join(last: Message, message: Message) -> bool:
    """Makes one of both, where they belong to one turn of the model."""
    if last["role"] != "assistant" or message["role"] != "assistant" or "reasoning" in message:
        return False  # reasoning begins a turn
    if "content" in message and "content" in last:
        return False
    last.update(message | {"tool_calls": last["tool_calls"] + message["tool_calls"]} if _both_call(last, message) else message)
    return True


def _both_call(last: Message, message: Message) -> bool:
    return "tool_calls" in last and "tool_calls" in message


def _said(where: str, item: dict[str, Any]) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {short(role)}", "input")
    return {"role": _ROLES[role], "content": content_text(f"{where}.content", _required(where, item, "content"))}


def _reasoning(where: str, item: dict[str, Any]) -> Message | None:
    if item.get("encrypted_content") is not None:
        raise InvalidRequestError(f"{where}.encrypted_content cannot be read here: send the reasoning's content", "input")
    name = "content" if item.get("content") else "summary"
    text = content_text(f"{where}.{name}", item.get(name))
    # Templates know one of these names.
    return {"role": "assistant", "reasoning": text, "reasoning_content": text} if text else None


def _call(where: str, item: dict[str, Any]) -> Message:
    arguments = _text(where, item, "arguments")
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{where}.arguments must be JSON, got {arguments!r:.80}", "input") from None
    function = {"name": _text(where, item, "name"), "arguments": value}
    return {
        "role": "assistant",
        "tool_calls": [{"id": _text(where, item, "call_id"), "type": "function", "function": function}],
    }


def _text(where: str, item: dict[str, Any], name: str) -> str:
    value = _required(where, item, name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text, got {short(value)}", "input")
    return value


def _required(where: str, item: dict[str, Any], name: str) -> Any:
    if item.get(name) is None:
        raise InvalidRequestError(f"{where}.{name} is required", "input")
    return item[name]

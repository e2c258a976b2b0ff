"""Chat messages as clients send them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from gateway.chat_messages import normalise_messages
from gateway.errors import InvalidRequestError


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    assert normalise_messages(user(parts)) == user("a\nb\nc")


def test_a_missing_content_is_empty_text() -> None:
    assert normalise_messages([{"role": "assistant"}, *user(None)]) == [{"role": "assistant", "content": ""}, *user("")]


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0] == call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}, "the caller's message was changed"


IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        (["hello"], "messages[0] must be an object"),
        ([{"content": "x"}], "messages[0].role must be a name such as 'user', got None"),
        ([*user("x"), {"role": "user", "content": 5}], "messages[1].content must be text or a list of parts, got 5"),
        (user([{"type": "text", "text": "a"}, IMAGE]), "messages[0].content[1]: image input is not supported"),
        (user([{"type": "input_audio"}]), "messages[0].content[0]: audio input is not supported"),
        (user([{"type": "poem"}]), "messages[0].content[0]: type 'poem' is not supported"),
        (user([{"type": ["text"]}]), "messages[0].content[0]: type ['text'] is not supported"),
        (user([{"type": "text"}]), "messages[0].content[0].text must be text, got None"),
        (user([7]), "messages[0].content[0] must be an object with a type, got 7"),
        (user({"x": "y" * 1000}), "messages[0].content must be text or a list of parts, got {'x': 'yyyy"),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls must be a list, got 'f()'"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0] must be an object with a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments must be JSON, got '{'",
        ),
    ],
)
def test_complaints_name_the_place(messages: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + re.escape(message)) as caught:
        normalise_messages(messages)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 200


def test_content_of_any_depth_is_refused_in_words() -> None:
    content: list[Any] = []
    for _ in range(2 * sys.getrecursionlimit()):
        content = [content]
    with pytest.raises(InvalidRequestError, match="got a list of great depth"):
        normalise_messages(user(content))

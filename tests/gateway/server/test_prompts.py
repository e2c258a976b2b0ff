"""From bodies to prompts."""

from __future__ import annotations

import json
import logging
from typing import Any, cast

import pytest

from gateway.server.prompts import chat_prompt, normalise_messages, split_prompts
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.testing import FakeRenderer

decoder = BodyDecoder(ChatCompletionRequest)


def chat_request(**fields: Any) -> ChatCompletionRequest:
    return decoder.decode(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_are_split_by_their_kind(prompt: Any, expected: Any) -> None:
    assert split_prompts(prompt) == expected


def test_text_parts_are_joined_and_everything_else_of_a_message_is_kept() -> None:
    message = {
        "role": "user",
        "name": "Ann",
        "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}],
    }
    assert normalise_messages([message]) == [{"role": "user", "name": "Ann", "content": "a\nb\nc"}]
    assistant = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    assert normalise_messages([assistant]) == [{**assistant, "content": ""}]


async def test_template_options_reach_the_renderer() -> None:
    renderer = FakeRenderer()
    tools = [{"type": "function"}]
    prompt = await chat_prompt(chat_request(tools=tools, chat_template_kwargs={"thinking": False}), cast(Any, renderer))
    assert prompt.text == "<user>hi<assistant>"
    assert list(prompt.token_ids) == [ord(char) for char in prompt.text]
    assert renderer.rendered[0]["tools"] == tools
    assert renderer.rendered[0]["chat_template_kwargs"] == {"thinking": False}


async def test_continuing_a_message_needs_no_second_flag() -> None:
    renderer = FakeRenderer()
    prompt = await chat_prompt(chat_request(continue_final_message=True), cast(Any, renderer))
    assert prompt.text == "<user>hi"
    assert renderer.rendered[0]["continue_final_message"] is True


async def test_special_tokens_are_the_templates_unless_asked_for() -> None:
    assert (await chat_prompt(chat_request(add_special_tokens=True), cast(Any, FakeRenderer()))).token_ids[0] == 1


def test_unknown_fields_are_named_in_the_debug_log_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chat_request(zebra=1, user="u")
    assert caplog.records == []
    caplog.set_level(logging.DEBUG)
    chat_request(zebra=1, user="u", n=1)
    assert caplog.records[-1].getMessage() == "ignored unknown fields: user, zebra"

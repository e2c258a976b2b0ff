"""From bodies to prompts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.server.prompts import chat_prompt, split_prompts
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.testing import FakeEngineClient

decoder = BodyDecoder(ChatCompletionRequest)


def chat_request(**fields: Any) -> ChatCompletionRequest:
    return decoder.decode(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_are_split_by_their_kind(prompt: Any, expected: Any) -> None:
    assert split_prompts(prompt) == expected


async def test_template_options_reach_the_renderer() -> None:
    engine = FakeEngineClient()
    tools = [{"type": "function"}]
    prompt = await chat_prompt(chat_request(tools=tools, chat_template_kwargs={"thinking": False}), engine)
    assert prompt.text == "<user>hi<assistant>"
    assert list(prompt.token_ids) == [ord(char) for char in prompt.text]
    assert engine.fake_renderer.rendered[0]["tools"] == tools
    assert engine.fake_renderer.rendered[0]["chat_template_kwargs"] == {"thinking": False}


async def test_continuing_a_message_needs_no_second_flag() -> None:
    engine = FakeEngineClient()
    prompt = await chat_prompt(chat_request(continue_final_message=True), engine)
    assert prompt.text == "<user>hi"
    assert engine.fake_renderer.rendered[0]["continue_final_message"] is True


async def test_special_tokens_are_the_templates_unless_asked_for() -> None:
    assert (await chat_prompt(chat_request(add_special_tokens=True), FakeEngineClient())).token_ids[0] == 1


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    engine = FakeEngineClient()
    messages = [{"role": "user", "content": "x" * engine.model_config.max_model_len}]
    with pytest.raises(InvalidRequestError) as error:
        await chat_prompt(chat_request(messages=messages), engine)
    assert error.value.code == "context_length_exceeded"


def test_unknown_fields_are_named_in_the_debug_log_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chat_request(zebra=1, user="u")
    assert caplog.records == []
    caplog.set_level(logging.DEBUG)
    chat_request(zebra=1, user="u", n=1)
    assert caplog.records[-1].getMessage() == "ignored unknown fields: user, zebra"


@pytest.mark.parametrize(
    ("route", "body", "num_sequences"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3}, 3),
        ("completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("responses", {"input": "hi"}, 1),
        ("embeddings", {"input": ["a", "b", "c"]}, 3),
    ],
)
async def test_a_request_holds_its_places_while_its_prompts_are_tokenized(
    serve: Any, route: str, body: dict[str, Any], num_sequences: int
) -> None:
    served = await serve()
    engine = served.engine
    if route == "embeddings":
        engine.embeds(4)
    held: set[int] = set()

    async def encode_async(text: str, add_special_tokens: bool) -> list[int]:
        held.add(engine.num_preparing)
        return engine.fake_renderer.tokenizer.encode(text, add_special_tokens)

    engine.renderer.encode_async = encode_async
    status, _, _ = await served.post(f"/v1/{route}", body)
    assert (status, held, engine.num_preparing) == (200, {num_sequences}, 0)

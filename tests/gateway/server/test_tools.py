"""Tool calls and reasoning over HTTP, with the official client library and an engine that says what it is told to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from cores.config import ConfigError
from cores.sampling_params import Reasoning, StructuredOutputKind
from cores.testing import make_tiny_model_dir
from gateway.config import ServerConfig
from gateway.engine_client import ModelConfig
from gateway.errors import InvalidRequestError
from gateway.grammar_checker import GrammarChecker
from gateway.server.sampling import to_sampling_params
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.server.tools import forced_call
from gateway.testing import FakeRequest, Script, says

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
QUESTION: Any = [{"role": "user", "content": "Hello?"}]
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def by_letter(text: str, n: int = 1) -> Script:
    def script(request: FakeRequest) -> None:
        for index in range(n):
            for char in text:
                request.put(char, index)
            request.put("", index, finish_reason="stop")

    return script


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> list[dict[str, Any]]:
    """What the deltas of each choice join to."""
    choices = [{"content": "", "reasoning": "", "calls": [], "reason": None} for _ in range(fields.get("n", 1))]
    async for chunk in await client.chat.completions.create(model="fake", messages=QUESTION, stream=True, **fields):
        for choice in chunk.choices:
            said, delta = choices[choice.index], choice.delta
            said["content"] += delta.content or ""
            reasoning = getattr(delta, "reasoning", None) or ""
            assert reasoning == (getattr(delta, "reasoning_content", None) or "")
            said["reasoning"] += reasoning
            for call in delta.tool_calls or ():
                if call.index == len(said["calls"]):
                    assert (call.type, bool(call.id), bool(call.function.name)) == ("function", True, True)
                    said["calls"].append([call.function.name, ""])
                else:
                    assert (call.id, call.function.name) == (None, None)
                said["calls"][call.index][1] += call.function.arguments
            said["reason"] = said["reason"] or choice.finish_reason
    return choices


async def test_a_call_of_the_model_is_a_tool_call_whole_and_streamed(serve: Any) -> None:
    text = f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>"
    served = await serve(by_letter(text, n=2), tool_call_parser="hermes", reasoning_parser="qwen3")
    async with served.openai() as client:
        whole = await client.chat.completions.create(model="fake", messages=QUESTION, tools=[WEATHER], n=2)
        choices = await streamed(client, tools=[WEATHER], n=2)
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls}) == 2
    for choice in whole.choices:
        message, (call,) = choice.message, choice.message.tool_calls
        assert (message.content, message.reasoning, message.reasoning_content) == ("I look.", "Hm.", "Hm.")
        assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Bern"}')
        assert choice.finish_reason == "tool_calls"
    assert whole.usage.completion_tokens == 2 * len(text)
    assert choices == 2 * [
        {"content": "I look.", "reasoning": "Hm.", "calls": [["weather", '{"city": "Bern"}']], "reason": "tool_calls"}
    ]


async def test_an_answer_without_a_call_is_as_without_tools(serve: Any) -> None:
    served = await serve(by_letter("2 < 3\n"), tool_call_parser="hermes")
    async with served.openai() as client:
        whole = await client.chat.completions.create(model="fake", messages=QUESTION, tools=[TIME])
        choices = await streamed(client, tools=[TIME])
    (choice,) = whole.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("2 < 3\n", None, "stop")
    assert choices == [{"content": "2 < 3\n", "reasoning": "", "calls": [], "reason": "stop"}]


async def test_a_malformed_call_is_content(serve: Any) -> None:
    text = "<tool_call>weather(Bern)</tool_call>"
    served = await serve(by_letter(text), tool_call_parser="hermes")
    async with served.openai() as client:
        assert await streamed(client, tools=[TIME]) == [{"content": text, "reasoning": "", "calls": [], "reason": "stop"}]


async def test_tool_choice_none_leaves_the_text_alone(serve: Any) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    served = await serve(says(text), tool_call_parser="hermes")
    async with served.openai() as client:
        (said,) = await streamed(client, tools=[WEATHER], tool_choice="none")
    assert (said["content"], said["calls"], said["reason"]) == (text, [], "stop")


async def test_without_parallel_calls_there_is_one(serve: Any) -> None:
    served = await serve(by_letter(f"<tool_call>{CALL}</tool_call>" * 2), tool_call_parser="hermes")
    async with served.openai() as client:
        assert len((await streamed(client, tools=[WEATHER]))[0]["calls"]) == 2
        assert len((await streamed(client, tools=[WEATHER], parallel_tool_calls=False))[0]["calls"]) == 1


async def test_a_required_call_is_a_grammar_and_needs_no_parser(serve: Any) -> None:
    served = await serve(by_letter('[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "B"}}]'))
    async with served.openai() as client:
        (said,) = await streamed(client, tools=[TIME, WEATHER], tool_choice="required")
    assert said == {
        "content": "", "reasoning": "", "calls": [["time", "{}"], ["weather", '{"city": "B"}']], "reason": "tool_calls",
    }  # fmt: skip
    wanted = served.engine.requests[0].params.structured_outputs
    assert (wanted.kind, wanted.param) == (StructuredOutputKind.JSON, "tool_choice")


async def test_a_named_call_is_its_arguments_and_ends_as_openai_says(serve: Any) -> None:
    served = await serve(by_letter('{"city": "B"}'))
    async with served.openai() as client:
        whole = await client.chat.completions.create(model="fake", messages=QUESTION, tools=[TIME, WEATHER], tool_choice=NAMED)
        (said,) = await streamed(client, tools=[TIME, WEATHER], tool_choice=NAMED)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "B"}')
    assert whole.choices[0].message.content is None
    assert said == {"content": "", "reasoning": "", "calls": [["weather", '{"city": "B"}']], "reason": "stop"}


@pytest.mark.parametrize(
    ("parser", "text", "reasoning"),
    [
        ("deepseek_r1", 'Hm.\n</think>\n\n{"city": "B"}', "Hm."),
        ("qwen3", '<think>Hm.</think>{"city": "B"}', "Hm."),
        ("qwen3", '{"city": "B"}', ""),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER], "tool_choice": NAMED},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"regex": ".*"}}},
    ],
)
async def test_a_grammar_is_about_what_comes_behind_the_reasoning(
    serve: Any, parser: str, text: str, reasoning: str, fields: dict[str, Any]
) -> None:
    served = await serve(by_letter(text), reasoning_parser=parser)
    async with served.openai() as client:
        (said,) = await streamed(client, **fields)
    wanted = served.engine.requests[0].params.structured_outputs
    assert wanted.reasoning == Reasoning("<think>", "</think>", is_open=parser == "deepseek_r1")
    assert said["reasoning"] == reasoning
    assert ([arguments for _, arguments in said["calls"]] or [said["content"]]) == ['{"city": "B"}']


@pytest.mark.parametrize("prompt", ["Hi", "Hi</think>\n\n"])
async def test_where_there_is_no_reasoning_a_grammar_begins_at_once(serve: Any, prompt: str) -> None:
    """The model of the server has none, or the template has ended it, as with `enable_thinking: false`."""
    served = await serve(says("{}"), reasoning_parser="qwen3" if "</think>" in prompt else None)
    body = {
        "messages": [{"role": "assistant", "content": prompt}],
        "response_format": {"type": "json_object"},
        "add_generation_prompt": False,
    }
    status, answer, _ = await served.post("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "{}")
    assert served.engine.requests[0].prompt_text.endswith(prompt)
    assert served.engine.requests[0].params.structured_outputs.reasoning is None


async def test_a_call_that_was_cut_off_ends_with_length(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put('<tool_call>{"name": "weather", "arguments": {"ci', finish_reason="length")

    served = await serve(script, tool_call_parser="hermes")
    async with served.openai() as client:
        (said,) = await streamed(client, tools=[WEATHER])
    assert (said["calls"], said["reason"]) == ([["weather", '{"ci']], "length")


async def test_ids_of_calls_are_as_mistrals_template_wants_them(serve: Any) -> None:
    served = await serve(says(f"[TOOL_CALLS][{CALL}]"), tool_call_parser="mistral")
    async with served.openai() as client:
        whole = await client.chat.completions.create(model="fake", messages=QUESTION, tools=[WEATHER])
    assert len(whole.choices[0].message.tool_calls[0].id) == 9


async def test_a_call_in_tags_has_arguments_as_the_tool_s_schema_says(serve: Any) -> None:
    text = "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>"
    served = await serve(by_letter(text), tool_call_parser="qwen3_coder")
    async with served.openai() as client:
        (said,) = await streamed(client, tools=[WEATHER])
    assert said == {
        "content": "I look.", "reasoning": "", "calls": [["weather", '{"city": "12"}']], "reason": "tool_calls",
    }  # fmt: skip


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
async def test_the_grammar_of_a_forced_call_compiles(tmp_path: Path, tool_choice: Any) -> None:
    body = {"messages": QUESTION, "tools": [TIME, WEATHER], "tool_choice": tool_choice, "parallel_tool_calls": False}
    request = BodyDecoder(ChatCompletionRequest).decode(json.dumps(body).encode())
    wanted = to_sampling_params(request, {}).structured_outputs
    assert wanted is not None
    model = make_tiny_model_dir(tmp_path)
    checker = GrammarChecker(
        ModelConfig("tiny", str(model), 128, json.loads((model / "config.json").read_text())["vocab_size"], (0,), 0)
    )
    try:
        await checker.check(wanted)
    finally:
        await checker.close()


def test_a_schema_of_any_depth_is_refused_in_words() -> None:
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"items": schema}
    for tool in ({"type": "function", "function": {"name": "f", "parameters": schema}}, {"type": "x", "function": schema}):
        request = ChatCompletionRequest(messages=[], tools=[tool], tool_choice="required")
        with pytest.raises(InvalidRequestError, match=r"nested too deeply|got dict"):
            forced_call(request)


@pytest.mark.parametrize(
    ("field", "flag", "allowed"),
    [
        ("tool_call_parser", "--tool-call-parser", "hermes, llama3_json, mistral, qwen3_coder"),
        ("reasoning_parser", "--reasoning-parser", "deepseek_r1, qwen3"),
    ],
)
def test_an_unknown_parser_is_refused_by_name(field: str, flag: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be one of {allowed}, got 'x'"):
        ServerConfig(**{field: "x"})

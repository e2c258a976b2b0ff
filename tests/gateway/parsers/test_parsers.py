"""Text in pieces to reasoning, content and tool calls. Whatever the pieces, the joined result is that of the whole text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.sampling_params import Reasoning
from gateway.parsers.choice import (
    TOOL_CALL_PARSERS,
    CallStage,
    ChoiceDelta,
    ChoiceParser,
    call_stage,
    marker_tokens,
    parse_whole,
)
from gateway.parsers.reasoning import END, REASONING_PARSERS, START, ReasoningParser, expected_reasoning
from gateway.parsers.tool_calls import REQUIRED, CallDelta, NamedCallParser, ToolCallParser

ALL_CALLS = (*TOOL_CALL_PARSERS, "required")
FUNCTIONS = {"f": {"properties": {"x": {"type": "object"}, "y": {"type": ["integer", "null"]}}}}
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"x\\" {", "days": [1, 2]}}\n</tool_call>'
WEATHER = ("weather", {"city": 'Zürich "x" {', "days": [1, 2]})


def stage(name: str) -> CallStage:
    return ToolCallParser(REQUIRED) if name == "required" else call_stage(name, FUNCTIONS)


def calls_parser(name: str) -> ChoiceParser:
    return ChoiceParser(None, stage(name))


def reasoning_parser(name: str, prompt: str = "", **options: bool) -> ReasoningParser | None:
    expected = expected_reasoning(name, prompt, **options)
    return None if expected is None else ReasoningParser(expected)


def thinking(name: str, prompt: str = "", **options: bool) -> ChoiceParser:
    return ChoiceParser(reasoning_parser(name, prompt, **options), None)


def parsed(parser: ChoiceParser, text: str) -> tuple[str, str, list[tuple[str | None, object]]]:
    whole = parse_whole(parser, text)
    assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
    return whole.reasoning, whole.content, [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "No call here, 1 < 2.\n", "No call here, 1 < 2.\n", []),
        ("hermes", "I look.\n\n" + HERMES_CALL, "I look.", [WEATHER]),
        ("hermes", HERMES_CALL + "\n" + HERMES_CALL + "\n", "", [WEATHER, WEATHER]),
        ("hermes", HERMES_CALL + "\n\nDone.", "Done.", [WEATHER]),
        ("hermes", HERMES_CALL.removesuffix("\n</tool_call>"), "", [WEATHER]),
        ("hermes", '<tool_call>{"arguments": {"a": "<tool_call>"}, "id": 1, "name": "f"}</tool_call>', "",
         [("f", {"a": "<tool_call>"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', "", [("f", {})]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
         [("f", {"a": 1}), ("g", {})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ("llama3_json", 'See: {"name": "f", "parameters": {}}', 'See: {"name": "f", "parameters": {}}', []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": []}}, {"name": "g", "arguments": {}}]', "",
         [("f", {"a": []}), ("g", {})]),
        ("mistral", 'Well [1]\n[TOOL_CALLS] [{"name": "f", "arguments": {}}] and [2]', "Well [1]and [2]", [("f", {})]),
        ("mistral", "a [TOOL] b [", "a [TOOL] b [", []),
        ("mistral", '[TOOL_CALLS]f{"a": "[TOOL_CALLS]}"}[TOOL_CALLS]g.h-1{}', "",
         [("f", {"a": "[TOOL_CALLS]}"}), ("g.h-1", {})]),
        ("mistral", 'Well.\n[TOOL_CALLS]f[ARGS]{"a": 1} \n[TOOL_CALLS] g [ARGS] {} Done.', "Well.Done.",
         [("f", {"a": 1}), ("g", {})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}[TOOL_CALLS][{"name": "g", "arguments": {}}]', "",
         [("f", {}), ("g", {})]),
        ("required", '[{"name": "f", "parameters": {"a": 1}}, \n{"name": "g", "parameters": {}}]\n', "",
         [("f", {"a": 1}), ("g", {})]),
    ],
)  # fmt: skip
def test_calls_are_found(name: str, text: str, content: str, calls: list[object]) -> None:
    assert parsed(calls_parser(name), text) == ("", content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather()</tool_call>",
        "<tool_call>\n</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "none"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call> and more',
        '<tool_call>{"name": "f", "argum</tool_call>',
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", }</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "Hi <tool_call>\n",
        "Hi <tool",
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(text: str) -> None:
    assert parsed(calls_parser("hermes"), text) == ("", text, [])


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]f(1)", "[TOOL_CALLS]f", "[TOOL_CALLS] f g {}", "[TOOL_CALLS]f[ARG]{}", "[TOOL_CALLS]é{}",
        "[TOOL_CALLS], {}", "[TOOL_CALLS]" + "f" * 600, "[TOOL_CALLS] are \n calls", "[TOOL_CALLS]",
    ],
)  # fmt: skip
def test_what_is_no_call_of_mistral_s_is_content(text: str) -> None:
    assert parsed(calls_parser("mistral"), text) == ("", text, [])


def test_a_named_call_of_mistral_s_comes_as_it_is_written() -> None:
    parser = calls_parser("mistral")
    assert not parser.push("[TOOL_CALLS]weather[ARGS]")
    assert parser.push('{"ci').calls == [CallDelta(0, "weather"), CallDelta(0, None, '{"ci')]
    assert parser.push('ty": 1}').calls == [CallDelta(0, None, 'ty": 1}')]


def test_a_call_begins_with_its_name_and_its_arguments_come_as_they_are_written() -> None:
    parser = calls_parser("hermes")
    assert not parser.push('<tool_call>{"name": "f", "arguments": ')
    (begun, first) = parser.push('{"text": "a').calls
    assert (begun.index, begun.name, begun.arguments, first.name, first.arguments) == (0, "f", "", None, '{"text": "a')
    assert [call.arguments for call in parser.push(" b").calls] == [" b"]
    assert [call.arguments for call in parser.push('"}}</tool_call>').calls] == ['"}']
    assert not parser.finish()


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    whole = parse_whole(calls_parser("hermes"), '<tool_call>{"name": "f", "arguments": {"a": "b')
    assert [(call.name, call.arguments) for call in whole.calls] == [("f", '{"a": "b')]
    assert whole.content == ""


def test_only_what_may_be_a_marker_is_held_back() -> None:
    parser = ChoiceParser(reasoning_parser("qwen3"), stage("hermes"))
    shown = [parser.push(piece).content for piece in ("a", " <", "b", "<tool_ca", "ke>", "!")]
    assert shown == ["a", "", " <b", "", "<tool_cake>", "!"]


def test_more_calls_than_allowed_are_dropped() -> None:
    parser = ChoiceParser(None, stage("hermes"), max_calls=1)
    assert parsed(parser, HERMES_CALL + HERMES_CALL) == ("", "", [WEATHER])


def test_a_named_call_is_its_arguments_and_an_empty_answer_none() -> None:
    assert parsed(ChoiceParser(None, NamedCallParser("f")), '{"a": 1}') == ("", "", [("f", {"a": 1})])
    assert parsed(ChoiceParser(None, NamedCallParser("f")), "") == ("", "", [])


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("deepseek_r1", "", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("deepseek_r1", "", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("deepseek_r1", "…<think>\n", "hm", "hm", ""),
        ("deepseek_r1", "", "", "", ""),
        ("qwen3", "", "<think>\nhm\n</think>\n\nYes </think>.", "hm", "Yes </think>."),
        ("qwen3", "", "Yes <think>.", "", "Yes <think>."),
        ("qwen3", "…<think>\n", "hm</think>Yes", "hm", "Yes"),
        ("qwen3", "…<think>\n\n</think>\n\n", "<think> is a tag", "", "<think> is a tag"),
        ("qwen3", "", "  <thi", "", "  <thi"),
        ("qwen3", "", "<think>a</thi", "a</thi", ""),
    ],
)
def test_reasoning_is_told_from_content(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert parsed(thinking(name, prompt), text) == (reasoning, content, [])


def test_a_continued_message_goes_on_with_what_it_was_in_the_middle_of() -> None:
    assert parsed(thinking("deepseek_r1", "<think>a", continues_message=True), "b</think>c") == ("b", "c", [])
    assert parsed(thinking("deepseek_r1", "<think>a</think>b", continues_message=True), "c") == ("", "c", [])
    assert parsed(thinking("deepseek_r1", "Well, ", continues_message=True), "yes") == ("", "yes", [])


def test_a_call_inside_reasoning_is_reasoning_and_one_behind_it_a_call() -> None:
    parser = ChoiceParser(ReasoningParser(Reasoning(START, END, is_open=True)), stage("hermes"))
    assert parsed(parser, "<tool_call>?</think>\n" + HERMES_CALL) == ("<tool_call>?", "", [WEATHER])


def test_the_tokens_that_parsers_need_are_named() -> None:
    assert marker_tokens(None, None) == ()
    assert set(marker_tokens("mistral", None)) >= {"[TOOL_CALLS]", "[ARGS]"}
    assert marker_tokens("qwen3_coder", None) == ("<tool_call>", "</tool_call>")
    assert set(marker_tokens("hermes", "qwen3")) == {"<think>", "</think>", "<tool_call>", "</tool_call>"}


PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", ",", ";", "{", "}", '"',
    "\\", " ", "\n", "a", "é", "<", "<t", '{"name": "f", "arguments": ', '{"name": "g", "parameters": {"x": "}"}}',
    '{"a": [1]}', '{"arguments": {"b": "\\""}, "name": "h"}', "f{", "[ARGS]",
]  # fmt: skip
TAGS = [
    "<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=", "<parameter=x>", "<parameter=y>",
    "<parameter=z>", "</parameter>", "<parameter=y>3</parameter>", "y>", "a", "é", "\n", " ", "<", '"', "{}", "null",
]  # fmt: skip
TEXTS = st.sampled_from([PARTS, TAGS]).flatmap(lambda parts: st.lists(st.sampled_from(parts), max_size=14)).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(1, 9), max_size=200), form=st.sampled_from(ALL_CALLS), data=st.data())
def test_any_split_of_a_text_joins_to_the_same(text: str, cuts: list[int], form: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([None, *REASONING_PARSERS]))

    def new() -> ChoiceParser:
        return ChoiceParser(None if name is None else reasoning_parser(name), stage(form))

    parser, joined, rest = new(), ChoiceDelta(), text
    for cut in [*cuts, len(text)]:
        joined, rest = joined + parser.push(rest[:cut]), rest[cut:]
    joined += parser.finish()
    whole = parse_whole(new(), text)
    assert joined == whole
    letters = [char for char in whole.reasoning + whole.content if char in "aé"]
    assert len(letters) <= sum(text.count(char) for char in "aé")


@given(text=st.text(alphabet=st.characters(exclude_characters="<[{")), name=st.sampled_from(TOOL_CALL_PARSERS))
def test_text_without_markers_passes_unchanged(text: str, name: str) -> None:
    parser = ChoiceParser(reasoning_parser("qwen3"), stage(name))
    joined = ChoiceDelta()
    for char in text:
        joined += parser.push(char)
    assert joined + parser.finish() == ChoiceDelta([text] if text else [])

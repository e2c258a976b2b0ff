"""Calls in tags: typed by the functions' schemas, in pieces as well as whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.choice import ChoiceDelta, ChoiceParser, parse_whole
from gateway.parsers.tagged_calls import TaggedCallParser
from gateway.parsers.tool_calls import CallDelta
from gateway.parsers.typed_values import parameter_types, value_to_json

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "tags": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"enum": [1, 2]},
        "where": {"$ref": "#/$defs/Where"},
    },
    "$defs": {"Where": {"$ref": "#/$defs/Place~1x"}, "Place/x": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
}


def new_parser() -> ChoiceParser:
    return ChoiceParser(None, TaggedCallParser({"weather": SCHEMA, "time": {"type": "object"}}))


def call(name: str, **parameters: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def parsed(text: str) -> tuple[str, list[tuple[str | None, Any]]]:
    whole = parse_whole(new_parser(), text)
    return whole.content, [(found.name, json.loads(found.arguments)) for found in whole.calls]


def test_values_are_what_the_schema_says() -> None:
    text = call(
        "weather", city="12", days="3", ratio="2", deep="True", tags='["a", {"b": null}]', maybe="null", level="2",
        where='{"x": 1}', other="[1]",
    )  # fmt: skip
    expected = {
        "city": "12", "days": 3, "ratio": 2, "deep": True, "tags": ["a", {"b": None}], "maybe": None, "level": 2,
        "where": {"x": 1}, "other": "[1]",
    }  # fmt: skip
    assert parsed(text) == ("", [("weather", expected)])


def test_what_cannot_be_read_as_its_type_is_text() -> None:
    text = call("weather", days="three", deep="1", ratio="NaN", tags="[1", maybe="12", where="[" * 100_000, level="1.5")
    (_, arguments), = parsed(text)[1]  # fmt: skip
    assert arguments.pop("where") == "[" * 100_000
    assert arguments == {"days": "three", "deep": "1", "ratio": "NaN", "tags": "[1", "maybe": "12", "level": "1.5"}


def test_text_keeps_all_but_the_line_breaks_of_its_tags() -> None:
    code = '\n  if a < b:\r\n\tprint("</p>\\n é")\n\n'
    assert parsed(call("weather", city=code, maybe=code)) == ("", [("weather", {"city": code, "maybe": code})])
    assert parsed("<function=weather><parameter=city></parameter><parameter=maybe>\n</parameter></function>") == (
        "",
        [("weather", {"city": "", "maybe": ""})],
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("No call, 1 < 2.\n", "No call, 1 < 2.\n", []),
        ("I look.\n\n" + call("time") + "\n" + call("time", zone="CET") + "\nDone.", "I look.Done.",
         [("time", {}), ("time", {"zone": "CET"})]),
        ("<function=time>\n</function>\n</tool_call>", "", [("time", {})]),
        ("<tool_call><function=time></function><function=time></function></tool_call>", "", [("time", {}), ("time", {})]),
        ("<tool_call><function=time>\n</tool_call>", "", [("time", {})]),
        ("<tool_call><function=time><parameter=a>1<parameter=b>2</function>", "", [("time", {"a": "1", "b": "2"})]),
        ("<tool_call><function=time>hm<parameter=>x</parameter></function>", "", [("time", {})]),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, content: str, calls: list[Any]) -> None:
    assert parsed(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>weather(Bern)</tool_call>", '<tool_call>{"name": "time"}</tool_call>', "<tool_call>\n", "Hi <tool_c",
        "<function=>x", "<function=a\nb>", "<tool_call>\n <function=a<b>", "<function=" + "a" * 300 + ">", "<function=time",
    ],
)  # fmt: skip
def test_what_is_no_call_is_content_as_it_was_written(text: str) -> None:
    assert parsed(text) == (text, [])


def test_text_comes_as_it_is_written_and_other_values_when_they_are_whole() -> None:
    parser = new_parser()
    assert parser.push("<tool_call>\n<function=weather>\n<para").calls == [CallDelta(0, "weather")]
    assert parser.push("meter=city>\nBe").calls == [CallDelta(0, None, '{"city": "'), CallDelta(0, None, "Be")]
    assert parser.push('"rn\n').calls == [CallDelta(0, None, '\\"rn')]
    assert parser.push("</parameter><parameter=days>\n1").calls == [CallDelta(0, None, '"'), CallDelta(0, None, ', "days": ')]
    assert not parser.push("2\n</par")
    assert parser.push("ameter>").calls == [CallDelta(0, None, "12")]
    assert parser.push("</function></tool_call>").calls == [CallDelta(0, None, "}")]
    assert not parser.finish()


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    whole = parse_whole(new_parser(), "<tool_call><function=weather><parameter=city>Bern</par")
    assert whole.parts == [CallDelta(0, "weather", '{"city": "Bern</par')]
    whole = parse_whole(new_parser(), "<tool_call><function=weather><parameter=days>1")
    assert whole.parts == [CallDelta(0, "weather", '{"days": ')]


VALUES = st.text(alphabet=st.sampled_from('ab1"\\\n\t é<>/{}[],:'), max_size=12)


@given(values=st.dictionaries(st.sampled_from(["city", "maybe", "other"]), VALUES), data=st.data())
def test_any_text_survives_in_any_pieces(values: dict[str, str], data: st.DataObject) -> None:
    text = call("weather", **values)
    parser, joined = new_parser(), ChoiceDelta()
    while text:
        size = data.draw(st.integers(1, 30))
        joined, text = joined + parser.push(text[:size]), text[size:]
    joined += parser.finish()
    (found,) = joined.parts
    assert isinstance(found, CallDelta)
    assert json.loads(found.arguments) == values


@given(text=st.text(), types=st.sets(st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])))
def test_a_value_is_always_json(text: str, types: set[str]) -> None:
    json.loads(value_to_json(text, frozenset(types)))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, {"string"}),
        ({"properties": []}, {"string"}),
        ({"properties": {"a": True}}, {"string"}),
        ({"properties": {"a": {"type": ["integer", 5]}}}, {"integer"}),
        ({"properties": {"a": {"const": None}}}, {"null"}),
        ({"properties": {"a": {"$ref": "#/nowhere/x"}}}, {"string"}),
        ({"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": SCHEMA["$defs"]}, {"string"}),
        (
            {"properties": {"a": {"anyOf": [{"enum": ["x", 1.5]}, {"allOf": [{"type": "array"}]}]}}},
            {"string", "number", "array"},
        ),
    ],
)
def test_types_are_found_in_schemas_of_any_form(schema: dict[str, Any], types: set[str]) -> None:
    assert parameter_types(schema, "a") == types

"""What a grammar takes, and in which words one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from cores.sampling_params import (
    InvalidParameterError,
    Reasoning,
    SamplingParams,
    StructuredOutputKind,
    StructuredOutputs,
)
from cores.structured_outputs import MAX_REASON_CHARS, GrammarError, as_lark, compile_grammar, load_grammar_tokenizer
from cores.testing import make_tiny_model_dir, make_tiny_tokenizer

JSON, REGEX, CHOICE, GRAMMAR = StructuredOutputKind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> LLTokenizer:
    return load_grammar_tokenizer(str(model), 484, (2, 0))


def takes(tokenizer: LLTokenizer, wanted: StructuredOutputs, text: str) -> bool:
    """The whole text, and may end there."""
    matcher, ids = compile_grammar(tokenizer, wanted), tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


LANGUAGES = pytest.mark.parametrize(
    ("kind", "spec", "good", "bad"),
    [
        (REGEX, "a+b", "aab", "xaab"),
        (REGEX, "a+b", "ab", "abx"),
        (REGEX, "/[/]", "//", "/"),
        (CHOICE, '["one", "\\"two\\"", "drei\\n"]', '"two"', "two"),
        (CHOICE, '["😀", "\\u00e9"]', "😀", "x"),
        (GRAMMAR, "start: A B?\nA: /[0-9]+/\nB: \"px\"", "12px", "px"),
        (GRAMMAR, 'root ::= [0-9]+ ("px" | "em")', "12em", "12"),
        (JSON, '{"type": "array", "items": {"type": "null"}}', "[null,null]", "null"),
        (JSON, '{"type": "object"}', '{"a": [1, {"b": null}]}', "[]"),
        (JSON, '{"oneOf": [{"const": 1}, {"const": 2}]}', "2", "3"),
    ],
)  # fmt: skip


@LANGUAGES
def test_languages(tokenizer: LLTokenizer, kind: StructuredOutputKind, spec: str, good: str, bad: str) -> None:
    assert takes(tokenizer, StructuredOutputs(kind, spec), good)
    assert not takes(tokenizer, StructuredOutputs(kind, spec), bad)


@LANGUAGES
def test_one_text_of_lark_is_the_same_language(
    tokenizer: LLTokenizer, kind: StructuredOutputKind, spec: str, good: str, bad: str
) -> None:
    for reasoning, before in ((None, ""), (Reasoning("<think>", "</think>", is_open=True), "I see.</think>")):
        lark = as_lark(tokenizer, StructuredOutputs(kind, spec, reasoning=reasoning))
        assert takes(tokenizer, StructuredOutputs(GRAMMAR, lark), before + good)
        assert not takes(tokenizer, StructuredOutputs(GRAMMAR, lark), before + bad)


@pytest.mark.parametrize(("space", "expected"), [("", True), (" ", True), ("\n  ", True), (" " * 40, True), (" " * 41, False)])
def test_json_may_be_spaced_but_not_without_end(tokenizer: LLTokenizer, space: str, expected: bool) -> None:
    assert takes(tokenizer, StructuredOutputs(JSON, '{"type": "array"}'), f"[{space}1,{space}2]") is expected


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        (REGEX, "(", "unclosed group"),
        (REGEX, "(?=a)b", "look-around"),
        (CHOICE, '["a"', "Expecting ',' delimiter"),
        (CHOICE, "[]", "a choice needs a list of at least one text"),
        (CHOICE, "[1]", "a choice needs a list of at least one text"),
        (CHOICE, '{"a": 1}', "a choice needs a list of at least one text"),
        (GRAMMAR, "start: missing", 'unknown name: "missing"'),
        (GRAMMAR, "root ::= missing", "Rule 'missing' not found"),
        (GRAMMAR, "hello", "Failed to convert the grammar from GBNF"),
        (JSON, "{", "EOF while parsing"),
        (JSON, "[]", "Expecting object schema"),
        (JSON, '{"type": "integerr"}', "Invalid type: integerr"),
        (JSON, '{"$ref": "#/$defs/missing"}', "Pointer '/$defs/missing' does not exist"),
        (JSON, '{"$ref": "http://example.org/s.json"}', "Default retriever does not fetch resources"),
        (JSON, '{"minimum": 3, "maximum": 2, "type": "integer"}', "minimum (3) is greater than maximum (2)"),
        (JSON, '{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        (JSON, '{"oneOf": [{"minimum": 0}, {"maximum": 5}]}', "oneOf constraints are not supported"),
        (JSON, '{"oneOf": ' + '{"not": ' * 3000 + "{}" + "}" * 3001, "nested too deeply"),
        (JSON, '{"a": ' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
        (GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    ],
)  # fmt: skip
def test_reasons(tokenizer: LLTokenizer, kind: StructuredOutputKind, spec: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(tokenizer, StructuredOutputs(kind, spec))
    assert reason in str(caught.value)
    assert len(str(caught.value)) <= MAX_REASON_CHARS


def test_what_grammars_cannot_say_is_refused_and_not_ignored(tokenizer: LLTokenizer) -> None:
    for schema in ({"not": {"type": "null"}}, {"if": {"const": 1}, "then": {"const": 1}}, {"propertyNames": {"pattern": "a"}}):
        with pytest.raises(GrammarError, match="Unimplemented keys"):
            compile_grammar(tokenizer, StructuredOutputs(JSON, json.dumps(schema)))


def test_several_tokens_may_end_an_output(tokenizer: LLTokenizer) -> None:
    matcher = compile_grammar(tokenizer, StructuredOutputs(REGEX, "a*"))
    assert matcher.compute_bitmask()[0] & 0b111 == 0b101


def test_a_tokenizer_with_the_settings_of_a_training_run(model: Path, tmp_path: Path) -> None:
    padded = Tokenizer.from_file(str(model / "tokenizer.json"))
    padded.enable_padding(length=50)
    padded.enable_truncation(2)
    padded.save(str(tmp_path / "tokenizer.json"))
    assert len(load_grammar_tokenizer(str(tmp_path), 484, (2,)).tokenize_str("abcdef")) == 6


@pytest.mark.parametrize(("content", "vocab_size"), [("{}", 484), (None, 100)])
def test_a_tokenizer_that_does_not_fit(model: Path, tmp_path: Path, content: str | None, vocab_size: int) -> None:
    (tmp_path / "tokenizer.json").write_text(content or (model / "tokenizer.json").read_text())
    with pytest.raises(GrammarError, match="the model's tokenizer cannot be used with grammars"):
        load_grammar_tokenizer(str(tmp_path), vocab_size, (2,))


@pytest.mark.parametrize(("kind", "length"), [(REGEX, 0), (REGEX, 32 * 1024 + 1), (JSON, 128 * 1024 + 1)])
def test_the_length_of_a_spec_is_bounded(kind: StructuredOutputKind, length: int) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(kind, "x" * length, "response_format"))
    with pytest.raises(InvalidParameterError, match=f"response_format: a {kind.value} must have .* got {length}") as caught:
        params.verify()
    assert caught.value.param == "response_format"


# --- behind reasoning -------------------------------------------------------------------------------------------------


def thinking_tokenizer(kind: str) -> LLTokenizer:
    """Models have the markers as special tokens, as tokens that are not, or as text that others spell."""
    tokenizer = make_tiny_tokenizer()
    if kind != "spelt":
        tokenizer.add_tokens(
            [AddedToken(marker, special=kind == "special", normalized=False) for marker in ("<think>", "</think>")]
        )
    return LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[2, 0])


@pytest.mark.parametrize("tokens", ["special", "plain", "spelt"])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("kind", "spec", "answer"),
    [
        (JSON, '{"type": "object"}', '{"a": "</b>"}'),
        (REGEX, r"\s?a+(.|\n)*b", "\na </b"),
        (CHOICE, '["yes", "no"]', "no"),
        (GRAMMAR, "start: A\nA: /[0-9]+/", "12"),
        (GRAMMAR, 'root ::= "a" | "b"', "b"),
    ],
)
def test_a_grammar_begins_behind_the_reasoning(
    tokens: str, is_open: bool, kind: StructuredOutputKind, spec: str, answer: str
) -> None:
    tokenizer = thinking_tokenizer(tokens)
    matcher = compile_grammar(tokenizer, StructuredOutputs(kind, spec, reasoning=Reasoning("<think>", "</think>", is_open)))
    for text, expected in (
        (f"hm, {answer} </thi\n</think>\n\n{answer}", is_open),
        (f"</think>{answer}", is_open),
        (f"\n<think>\nDas wäre 日</think>{answer}", True),
        (f"<think>hm</think> {answer}", True),
        (answer, not is_open),
        (f"<think>hm</think>?{answer}", False),
        ("<think>hm</think>", False),
        (f"<think>hm {answer}", False),
        ("", False),
    ):
        for token_ids in (tokenizer.tokenize_str(text), tokenizer.greedy_tokenize(text)):
            matcher.reset()
            taken = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
            assert taken is expected, (text, token_ids)


def test_markers_of_reasoning_are_read_as_they_are_written(tokenizer: LLTokenizer) -> None:
    wanted = StructuredOutputs(REGEX, "a", reasoning=Reasoning('["/', r".*/]\\", True))
    assert takes(tokenizer, wanted, r'["/hm.*/].*/]\\a')
    assert not takes(tokenizer, wanted, r"hm /]\\a")


@pytest.mark.parametrize("marker", ["", "x" * 65, "\ud800"])
def test_a_marker_that_is_none_is_refused(marker: str) -> None:
    wanted = StructuredOutputs(REGEX, "a", reasoning=Reasoning("<think>", marker, True))
    with pytest.raises(InvalidParameterError, match="markers of reasoning have 1 to 64 characters"):
        SamplingParams(structured_outputs=wanted).verify()

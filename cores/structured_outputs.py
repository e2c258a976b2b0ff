"""From what the output of a request must look like to a compiled grammar, through llguidance. Knows no requests and no logits.

Compiling runs native code on what strangers send, and its own limits do not cover everything: a JSON schema of 2 kB
(`allOf` of fifty patterns) never finishes, a Lark grammar of 35 kB overflows the stack and ends the process, an integer with
`multipleOf` 999983 takes 10 s and 350 MB. So a front end compiles each grammar once in a process that may die of it
(`gateway.grammar_checker`); what has passed there comes to the engines, which give it more stack and more time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from cores.sampling_params import Reasoning, StructuredOutputKind, StructuredOutputs
from cores.schema_unions import without_disjoint_one_of

# Between the tokens of JSON. Without an end a model that falls into a loop of newlines stays within the grammar for ever.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
MAX_REASON_CHARS = 600

# A lexer's state takes 1 to 2 kB: without this limit a hostile regex may hold 500 MB of them. `verbose_errors` would quote the
# grammar and the output so far into every message.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class GrammarError(ValueError):
    """A grammar that cannot be used, or a tokenizer for which there are none. The message is the reason, without the field."""


def load_grammar_tokenizer(model_dir: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """What every grammar of this model is compiled with. Takes 0.3 s and 60 MB for 49,000 tokens."""
    try:
        tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        tokenizer.no_padding()  # some tokenizer.json files carry the settings of a training run
        tokenizer.no_truncation()
        return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # both libraries raise plain Exception for whatever is wrong in the file
        raise GrammarError(f"the model's tokenizer cannot be used with grammars: {error}") from error


def compile_grammar(tokenizer: LLTokenizer, wanted: StructuredOutputs) -> LLMatcher:
    """A matcher before its first token, its first mask computed. Releases the GIL. Raises `GrammarError` with the reason."""
    matcher = LLMatcher(tokenizer, _to_llguidance(tokenizer, wanted), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the dearest one: the lexer has nothing cached yet
    check_matcher(matcher)
    return matcher


def as_lark(tokenizer: LLTokenizer | None, wanted: StructuredOutputs) -> str:
    """All of it as one text of Lark, for an engine that takes grammars in no other form. Raises `GrammarError`."""
    parts = _parts(_to_llguidance(tokenizer, wanted))
    if len(parts) == 1:
        return f"start: {_nested(parts[0])}" if parts[0].get("json_schema") is not None else str(parts[0]["lark_grammar"])
    thought, answer = parts
    return f"{thought['lark_grammar']}\nanswer: {_nested(answer)}".replace("@answer", "answer", 1)


def _nested(part: dict[str, Any]) -> str:
    schema = part.get("json_schema")
    return f"%lark {{\n{part['lark_grammar']}\n}}" if schema is None else f"%json {json.dumps(schema)}"


def check_matcher(matcher: LLMatcher) -> None:
    """Raises `GrammarError` if something has gone wrong in it; it never recovers from that."""
    if matcher.is_error():
        raise GrammarError(_shortened(matcher.get_error()))


def _to_llguidance(tokenizer: LLTokenizer | None, wanted: StructuredOutputs) -> str:
    """The tokenizer is needed for what comes behind reasoning."""
    try:
        grammar = _translated(wanted)
        if wanted.reasoning is None:
            return grammar
        assert tokenizer is not None, "markers are looked up in it"
        return _behind(wanted.reasoning, grammar, tokenizer)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(_shortened(str(error))) from error


def _translated(wanted: StructuredOutputs) -> str:
    match wanted.kind:
        case StructuredOutputKind.JSON:
            spec = _with_any_of(wanted.spec) if "oneOf" in wanted.spec else wanted.spec
            return LLMatcher.grammar_from_json_schema(spec, defaults={"whitespace_pattern": JSON_WHITESPACE})
        case StructuredOutputKind.REGEX:
            return LLMatcher.grammar_from_regex(wanted.spec)
        case StructuredOutputKind.CHOICE:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(_read_choices(wanted.spec)))
        case StructuredOutputKind.GRAMMAR:
            return llguidance.grammar_from("grammar", wanted.spec)


def _behind(reasoning: Reasoning, grammar: str, tokenizer: LLTokenizer) -> str:
    """A grammar of reasoning and, behind it, the other one: so the state of both follows from the tokens, wherever they are
    replayed. White space beside the markers is free: models are used to it, and those who read the output drop it."""
    answer = _parts(grammar)
    answer[0]["name"] = "answer"
    end = re.escape(reasoning.end).replace("/", "\\/")
    start = _marker(tokenizer, reasoning.start)
    # Where the marker is a token of its own, its text may still be spelt with others: that ends the reasoning too.
    end_id = _special_id(tokenizer, reasoning.end)
    thought = "SPELT" if end_id is None else f"(SPELT | FREE <[{end_id}]>)"
    lark = [
        f"start: SPACE? {start}? thought SPACE? @answer" if reasoning.is_open else
        f"start: (SPACE? {start} thought SPACE?)? @answer",
        f"thought: {thought}",
        f"FREE: /(?s:.*)/ & ~/(?s:.*){end}(?s:.*)/",
        f"SPELT: /(?s:.*){end}/ & ~/(?s:.*){end}(?s:.+)/",
        r"SPACE: /[ \t\r\n]{1,8}/",
    ]  # fmt: skip
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lark)}, *answer]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    """What compilers of ours made is JSON already, what they only translated is Lark."""
    if not grammar.startswith('{"grammars"'):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def _marker(tokenizer: LLTokenizer, text: str) -> str:
    token_id = _special_id(tokenizer, text)
    return json.dumps(text) if token_id is None else f"({json.dumps(text)} | <[{token_id}]>)"


def _special_id(tokenizer: LLTokenizer, marker: str) -> int | None:
    """None for a text that tokens only spell."""
    token_ids = tokenizer.tokenize_str(marker)
    return token_ids[0] if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]) else None


def _with_any_of(spec: str) -> str:
    schema = json.loads(spec)
    return json.dumps(without_disjoint_one_of(schema)) if isinstance(schema, dict) else spec


def _read_choices(spec: str) -> list[str]:
    """Each as a literal of Lark, which reads JSON's strings."""
    choices = json.loads(spec)
    if not (isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)):
        raise ValueError("a choice needs a list of at least one text")
    return [json.dumps(choice, ensure_ascii=False) for choice in choices]


def _shortened(reason: str) -> str:
    reason = reason.strip()
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"

"""Two hundred schemas in one batch of a random model: it says nothing sensible, and all of it must fit its schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for
from tokenizers import Tokenizer

from cores.messages import FinishReason
from cores.sampling_params import StructuredOutputKind, StructuredOutputs
from cores.testing import make_request
from tests.cores.runner.schema_set import UNBOUNDED, Schema, schema_set
from tests.cores.runner.torch_engine import Engine

MAX_TOKENS = 300
FORMATS = FormatChecker(formats=["date", "ipv4", "uuid"])


@FORMATS.checks("date-time")
@FORMATS.checks("time")
def is_rfc_3339(value: object) -> bool:
    day, clock = r"\d{4}-\d{2}-\d{2}[Tt ]", r"\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})"
    return not isinstance(value, str) or re.fullmatch(f"({day})?{clock}", value) is not None


@pytest.fixture(scope="module")
def answers(tiny_llama: Any) -> dict[str, tuple[str, FinishReason]]:
    """By name of the schema: the text, and how it ended. Sampled at temperature 1."""
    engine = Engine(tiny_llama, num_kv_blocks=4000)
    requests = [
        make_request(
            i, [5 + i % 60, 7], max_tokens=MAX_TOKENS, temperature=1.0, ignore_eos=i % 2 == 0,
            structured_outputs=StructuredOutputs(StructuredOutputKind.JSON, json.dumps(schema)),
        )
        for i, (_, schema) in enumerate(schema_set())
    ]  # fmt: skip
    tokens = engine.run(requests)
    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    return {
        name: (tokenizer.decode(tokens[i], skip_special_tokens=True), engine.ends[i].reason)
        for i, (name, _) in enumerate(schema_set())
    }


def test_there_are_two_hundred_different_schemas() -> None:
    schemas = [json.dumps(schema) for _, schema in schema_set()]
    assert len(schemas) == len(set(schemas)) == 200
    for _, schema in schema_set():
        validator_for(schema, Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize(("name", "schema"), schema_set(), ids=[name for name, _ in schema_set()])
def test_the_output_fits(answers: dict[str, tuple[str, FinishReason]], name: str, schema: Schema) -> None:
    text, reason = answers[name]
    if reason is FinishReason.LENGTH and name.startswith(UNBOUNDED):
        return
    assert reason is FinishReason.STOP, f"not done after {MAX_TOKENS} tokens: {text!r}"
    value = json.loads(text, object_pairs_hook=unique)
    validator_for(schema, Draft202012Validator)(schema, format_checker=FORMATS).validate(value)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), f"a name comes twice: {names}"
    return dict(pairs)


def test_recursive_outputs_end_too(answers: dict[str, tuple[str, FinishReason]]) -> None:
    ended = [reason for name, (_, reason) in answers.items() if name.startswith(UNBOUNDED) and reason is FinishReason.STOP]
    assert len(ended) >= 3

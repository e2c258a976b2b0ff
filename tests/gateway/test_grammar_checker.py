"""Grammars are judged in a process that may die of them. Real child processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cores.sampling_params import StructuredOutputKind, StructuredOutputs
from cores.testing import make_tiny_model_dir
from gateway.engine_client import ModelConfig
from gateway.errors import EngineDeadError, InvalidRequestError, OverloadedError
from gateway.grammar_checker import MAX_WAITING, GrammarChecker

GOOD = StructuredOutputs(StructuredOutputKind.REGEX, "a+")
BAD = StructuredOutputs(StructuredOutputKind.JSON, '{"type": "integerr"}', "response_format")
ENDLESS = {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(50)]}
BOTTOMLESS = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2400)) + 'r2400: "a"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = make_tiny_model_dir(tmp_path_factory.mktemp("tiny"))
    return ModelConfig("tiny", str(path), 2048, 484, (2, 0), created=0)


@pytest.fixture
async def checker(model: ModelConfig) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(model, cpu_limit_s=0.5)
    yield checker
    await checker.close()


async def refusal(checker: GrammarChecker, wanted: StructuredOutputs) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await checker.check(wanted)
    return caught.value


async def test_the_reason_is_the_compiler_s_and_the_field_the_request_s(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    error = await refusal(checker, BAD)
    assert (str(error), error.param) == ("response_format: Invalid type: integerr", "response_format")


async def test_a_grammar_that_never_compiles_is_refused_and_the_next_one_served(checker: GrammarChecker) -> None:
    error = await refusal(checker, StructuredOutputs(StructuredOutputKind.JSON, json.dumps(ENDLESS)))
    assert str(error) == "structured_outputs: this json takes more than 0.5 s to compile"
    await checker.check(GOOD)


async def test_a_grammar_that_kills_its_compiler_is_refused_and_the_next_one_served(checker: GrammarChecker) -> None:
    error = await refusal(checker, StructuredOutputs(StructuredOutputKind.GRAMMAR, BOTTOMLESS))
    assert str(error) == "structured_outputs: this grammar takes too much memory, or is nested too deeply, to compile"
    await checker.check(GOOD)


async def test_the_loop_turns_while_a_grammar_is_compiled(checker: GrammarChecker) -> None:
    judging = asyncio.create_task(refusal(checker, StructuredOutputs(StructuredOutputKind.JSON, json.dumps(ENDLESS))))
    turns = 0
    while not judging.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 50
    assert "takes more than" in str(judging.result())


async def test_a_verdict_is_asked_for_once(checker: GrammarChecker) -> None:
    await asyncio.gather(*(checker.check(GOOD) for _ in range(5)))
    await refusal(checker, BAD)
    assert checker._child is not None
    await checker._child.kill()
    await checker.check(GOOD)  # known without a child
    assert "integerr" in str(await refusal(checker, BAD))


async def test_a_client_that_leaves_does_not_disturb_the_next(checker: GrammarChecker) -> None:
    leaving = asyncio.create_task(checker.check(BAD))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await checker.check(GOOD)
    assert "integerr" in str(await refusal(checker, BAD))


async def test_only_so_many_may_wait_for_a_verdict(checker: GrammarChecker) -> None:
    many = [StructuredOutputs(StructuredOutputKind.REGEX, "a" * n) for n in range(1, MAX_WAITING + 2)]
    results: list[Any] = await asyncio.gather(*(checker.check(wanted) for wanted in many), return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * MAX_WAITING + [OverloadedError]


async def test_text_that_is_no_unicode_is_refused(checker: GrammarChecker) -> None:
    assert "surrogate" in str(await refusal(checker, StructuredOutputs(StructuredOutputKind.REGEX, "\ud800")))


async def test_a_model_without_a_tokenizer_for_grammars_is_an_error_of_ours(tmp_path: Path) -> None:
    checker = GrammarChecker(ModelConfig("none", str(tmp_path), 2048, 484, (2,), created=0))
    with pytest.raises(RuntimeError, match="does not start"):
        await checker.check(GOOD)


async def test_closing_ends_the_child_and_can_be_done_twice(model: ModelConfig) -> None:
    checker = GrammarChecker(model)
    await checker.check(GOOD)
    child = checker._child
    assert child is not None
    await checker.close()
    await checker.close()
    assert child.returncode is not None


async def test_nobody_starts_another_compiler_once_it_is_closed(model: ModelConfig) -> None:
    checker = GrammarChecker(model)
    grammars = [StructuredOutputs(StructuredOutputKind.REGEX, f"a{{{i}}}") for i in range(1, 4)]
    waiting = [asyncio.create_task(checker.check(grammar)) for grammar in grammars]
    await asyncio.sleep(0)  # each waits for its turn, or for the child
    await checker.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDeadError] * 3
    assert not [child for child in psutil.Process().children() if "grammar_process" in " ".join(child.cmdline())]

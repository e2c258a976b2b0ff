"""Structured output in the torch engine: alone, in a batch, preempted, continued, with slow and with broken grammars."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from cores.messages import EngineCoreRequest, Finished, FinishReason, TokenLogprobs
from cores.runner.grammar import COMPILE_TIMEOUT_S, MAX_COPIES, Grammars, StepGrammars
from cores.runner.interface import SchedulerOutput
from cores.sampling_params import Reasoning, StructuredOutputKind, StructuredOutputs
from cores.structured_outputs import check_matcher, compile_grammar, load_grammar_tokenizer
from cores.testing import ManualClock, make_request, make_tiny_tokenizer
from tests.cores.runner.torch_engine import Engine

DEADLINE_S = 60.0
PROMPT = [5, 6, 7, 8, 9]
END_OF_REASONING = make_tiny_tokenizer().token_to_id(">")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 20, "maxLength": 30}, "age": {"type": "integer", "minimum": 10}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX, CHOICE, GRAMMAR = StructuredOutputKind.REGEX, StructuredOutputKind.CHOICE, StructuredOutputKind.GRAMMAR


def structured(
    handle: int, kind: StructuredOutputKind, spec: str, prompt: list[int] = PROMPT, **params: Any
) -> EngineCoreRequest:
    settings = {"temperature": 1.0, "max_tokens": 100, "seed": 1} | params
    return make_request(handle, prompt, structured_outputs=StructuredOutputs(kind, spec), **settings)


def person(handle: int = 1, prompt: list[int] = PROMPT, **params: Any) -> EngineCoreRequest:
    return structured(handle, StructuredOutputKind.JSON, json.dumps(PERSON), prompt, **params)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammar_tokenizer(tiny_llama: Path) -> LLTokenizer:
    return load_grammar_tokenizer(str(tiny_llama), 484, (2, 0))


@pytest.fixture
def text_of(make_engine: Callable[..., Engine], tokenizer: Tokenizer) -> Callable[[EngineCoreRequest], str]:
    def run(request: EngineCoreRequest) -> str:
        engine = make_engine()
        tokens = engine.run([request])[request.handle]
        assert engine.ends[request.handle].reason is FinishReason.STOP
        return tokenizer.decode(tokens, skip_special_tokens=True)

    return run


# --- what comes out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_regex_matches_the_whole_output(text_of: Any, seed: int) -> None:
    text = text_of(structured(1, REGEX, r"[a-z]{3,8}-\d{2,4}(é|日){2}", seed=seed))
    stem, _, rest = text.partition("-")
    assert 3 <= len(stem) <= 8
    assert rest[:2].isdigit()
    assert set(rest[-2:]) <= {"é", "日"}


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_is_one_of_the_choices(text_of: Any, seed: int) -> None:
    choices = ["yes", "yes, but", 'a "quoted" one', "line\nbreak", "😀"]
    assert text_of(structured(1, CHOICE, json.dumps(choices), seed=seed)) in choices


LARK = 'start: NUMBER (OP NUMBER){1,3}\nOP: "+" | "*"\nNUMBER: /[1-9][0-9]{0,2}/'
GBNF = 'root ::= num (op num) (op num)?\nop ::= "+" | "*"\nnum ::= [1-9] [0-9]?'


@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
def test_a_grammar_is_followed(text_of: Any, grammar: str) -> None:
    text = text_of(structured(1, GRAMMAR, grammar))
    numbers = text.replace("*", "+").split("+")
    assert 2 <= len(numbers) <= 4
    assert all(number.isdigit() and number[0] != "0" for number in numbers)


def test_greedy_output_follows_the_grammar_too(text_of: Any) -> None:
    assert json.loads(text_of(person(temperature=0.0)))["age"] >= 10


# --- how it ends ------------------------------------------------------------------------------------------------------------


def test_eos_comes_only_where_the_grammar_may_end(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    requests = [structured(i, REGEX, "[ab]{3,}", seed=i, ignore_eos=i % 2 == 0, logit_bias={2: 3.0}) for i in range(8)]
    tokens = engine.run(requests)
    for handle, ids in tokens.items():
        assert ids[-1] in (2, 0)
        assert len(ids) >= 4
        # With EOS ignored it is no stop token; the end is the grammar's.
        assert engine.ends[handle] == Finished(FinishReason.STOP, None if handle % 2 == 0 else ids[-1])


def test_a_grammar_that_can_take_no_more_ends_the_request_without_another_step(
    make_engine: Callable[..., Engine], tokenizer: Tokenizer
) -> None:
    engine = make_engine()
    tokens = engine.run([structured(1, REGEX, "abc", min_tokens=50), structured(2, REGEX, "abc", max_tokens=3)])
    assert tokenizer.decode(tokens[1]) == tokenizer.decode(tokens[2]) == "abc"
    assert [engine.ends[i] for i in (1, 2)] == [Finished(FinishReason.STOP)] * 2


def test_min_tokens_put_off_an_end_that_the_grammar_would_allow(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    tokens = engine.run([structured(1, REGEX, "[ab]*", ignore_eos=False, min_tokens=12, logit_bias={2: 50.0})])[1]
    assert (len(tokens), tokens[-1]) == (13, 2)


def test_an_output_that_is_cut_off_says_so(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.run([person(max_tokens=5)])
    assert engine.ends[1] == Finished(FinishReason.LENGTH)


def test_log_probabilities_are_those_of_the_model_without_the_grammar(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.core.add_request(0, structured(1, REGEX, "b", logprobs=2))
    engine.core.add_request(0, make_request(2, PROMPT, logprobs=2))
    entries: dict[int, TokenLogprobs] = {}
    while len(entries) < 2:  # the constrained one may be a step behind, for its grammar's sake
        for outputs in engine.core.step().values():
            for row, (entry,) in outputs.logprobs.items():
                entries.setdefault(outputs.handles[row], entry)
    constrained, free = entries[1], entries[2]
    assert constrained.top_token_ids == free.top_token_ids
    assert constrained.rank > 1
    assert constrained.logprob < free.top_logprobs[0]


# --- whom it may not touch, and what may not touch it -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[int]:
    tokens = Engine(tiny_llama).run([person()])[1]
    assert len(tokens) > 20
    return tokens


def test_a_batch_with_free_requests_changes_no_token_of_either(make_engine: Callable[..., Engine], alone: list[int]) -> None:
    free = [make_request(i, [3 + i, 9], temperature=1.0, max_tokens=30) for i in range(10, 20)]
    expected = make_engine().run(free)
    together = make_engine(max_num_batched_tokens=16).run([*free[:5], person(), *free[5:]])
    assert together == expected | {1: alone}


def test_preemption_changes_no_token(make_engine: Callable[..., Engine], alone: list[int]) -> None:
    engine = make_engine(num_kv_blocks=20, block_size=4, enable_prefix_caching=False)
    tokens = engine.run([make_request(9, PROMPT, max_tokens=60), person()])
    assert engine.core.stats().num_preemptions > 0
    assert tokens[1] == alone


@pytest.mark.parametrize("num_delivered", [1, 7, 20, -1])
def test_a_request_continued_elsewhere_goes_on_as_it_would_have(
    make_engine: Callable[..., Engine], alone: list[int], num_delivered: int
) -> None:
    moved = person(9, PROMPT + alone[:num_delivered], num_original_prompt_tokens=len(PROMPT))
    assert make_engine().run([moved])[9] == alone[num_delivered:]


def test_a_long_prompt_in_chunks_changes_no_token(make_engine: Callable[..., Engine]) -> None:
    prompt = [3 + i % 200 for i in range(90)]
    whole = make_engine().run([person(prompt=prompt)])
    assert make_engine(max_num_batched_tokens=16).run([person(prompt=prompt)]) == whole


# --- behind reasoning -------------------------------------------------------------------------------------------------------


def thinker(handle: int = 1, prompt: list[int] = PROMPT, **params: Any) -> EngineCoreRequest:
    """Reasons up to the first ">", which is one token of the tiny model and not too rare here."""
    reasoning = Reasoning("<", ">", is_open=True)
    wanted = StructuredOutputs(REGEX, r"[a-z]{5,9}\.", reasoning=reasoning)
    settings = {"temperature": 1.0, "max_tokens": 200, "seed": 1, "logit_bias": {END_OF_REASONING: 3.0}} | params
    return make_request(handle, prompt, structured_outputs=wanted, **settings)


@pytest.fixture(scope="module")
def thought(tiny_llama: Path) -> list[int]:
    engine = Engine(tiny_llama)
    tokens = engine.run([thinker()])[1]
    assert engine.ends[1].reason is FinishReason.STOP
    return tokens


def test_reasoning_is_free_and_the_answer_follows_the_grammar(thought: list[int], tokenizer: Tokenizer) -> None:
    reasoning, _, answer = tokenizer.decode(thought, skip_special_tokens=True).partition(">")
    assert re.fullmatch(r"\s{0,8}[a-z]{5,9}\.", answer)
    assert thought.index(END_OF_REASONING) > 5
    assert not re.fullmatch("[a-z]*", reasoning)


def test_a_request_that_moves_goes_on_where_it_was_in_or_behind_its_reasoning(
    make_engine: Callable[..., Engine], thought: list[int]
) -> None:
    end = thought.index(END_OF_REASONING)
    for num_delivered in (0, 2, end, end + 1, end + 3):
        moved = thinker(9, PROMPT + thought[:num_delivered], num_original_prompt_tokens=len(PROMPT))
        assert make_engine().run([moved])[9] == thought[num_delivered:]


def test_an_output_does_not_end_in_its_reasoning_but_by_its_length(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    (tokens,) = engine.run([thinker(max_tokens=30, logit_bias={END_OF_REASONING: -100.0, 0: 5.0, 2: 5.0})]).values()
    assert (len(tokens), engine.ends[1].reason) == (30, FinishReason.LENGTH)


# --- what is wrong with one grammar fails its request alone -----------------------------------------------------------------


def errors_of(engine: Engine, *requests: EngineCoreRequest) -> dict[int, str | None]:
    for request in requests:
        engine.core.add_request(0, request)
    while engine.core.has_work:
        for outputs in engine.core.step().values():
            engine.ends |= {outputs.handles[row]: finished for row, finished in outputs.finished.items()}
    engine.core.check_invariants()
    return {handle: finished.error for handle, finished in engine.ends.items()}


def test_a_broken_grammar_fails_its_request_alone(make_engine: Callable[..., Engine]) -> None:
    errors = errors_of(
        make_engine(),
        structured(1, REGEX, "("),
        structured(2, StructuredOutputKind.JSON, '{"type": "integerr"}'),
        structured(3, CHOICE, "[]"),
        structured(4, REGEX, "a", [*PROMPT, 50], num_original_prompt_tokens=len(PROMPT)),
        structured(5, REGEX, "abc", allowed_token_ids=(50,)),
        structured(6, REGEX, "a+b"),
    )
    assert "unclosed group" in str(errors[1])
    assert errors[2] == "structured_outputs: Invalid type: integerr"
    assert errors[3] == "structured_outputs: a choice needs a list of at least one text"
    assert errors[4] == "structured_outputs: the tokens generated so far do not follow the grammar"
    assert "leave no token to choose" in str(errors[5])
    assert errors[6] is None


def test_without_a_tokenizer_for_grammars_the_model_still_serves_the_rest(tiny_llama: Path, tmp_path: Path) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    engine = Engine(tmp_path)
    assert engine.info.features == ("logprobs", "prompt_logprobs")
    errors = errors_of(engine, person(), make_request(2, PROMPT))
    assert errors == {1: "structured_outputs is not supported by this engine", 2: None}


# --- time -------------------------------------------------------------------------------------------------------------------


class SlowCompiler:
    """Compiles when it may."""

    def __init__(self) -> None:
        self.may_compile = threading.Event()

    def __call__(self, tokenizer: LLTokenizer, wanted: StructuredOutputs) -> LLMatcher:
        assert self.may_compile.wait(DEADLINE_S)
        return compile_grammar(tokenizer, wanted)


@pytest.fixture
def slow() -> Iterator[SlowCompiler]:
    compiler = SlowCompiler()
    yield compiler
    compiler.may_compile.set()


def replace_grammars(engine: Engine, grammars: Grammars) -> None:
    parts = engine.runner._parts
    assert parts is not None
    parts.grammars.close()
    engine.runner._parts = dataclasses.replace(parts, grammars=grammars)


def test_nobody_waits_for_another_s_grammar(
    make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer, slow: SlowCompiler, alone: list[int]
) -> None:
    engine = make_engine()
    replace_grammars(engine, Grammars(grammar_tokenizer, compile_=slow))
    engine.core.add_request(0, person())
    engine.core.add_request(0, make_request(2, PROMPT, max_tokens=50))
    for _ in range(5):
        (outputs,) = engine.core.step().values()
        assert list(outputs.handles) == [2]
        engine.core.check_invariants()
    slow.may_compile.set()
    tokens = [token_id for _ in range(200) for token_id in row_of(engine, 1)]
    assert tokens == alone


def row_of(engine: Engine, handle: int) -> list[int]:
    outputs = engine.core.step().get(0)
    return [] if outputs is None else [t for h, t in zip(outputs.handles, outputs.token_ids, strict=True) if h == handle]


def test_a_grammar_that_is_never_compiled_fails_its_request(
    make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer, slow: SlowCompiler
) -> None:
    engine, clock = make_engine(), ManualClock()
    replace_grammars(engine, Grammars(grammar_tokenizer, compile_=slow, clock=clock))
    engine.core.add_request(0, person())
    assert engine.core.step() == {}
    clock.now = COMPILE_TIMEOUT_S + 1
    (outputs,) = engine.core.step().values()
    assert outputs.finished[0].error == f"structured_outputs: not compiled after {COMPILE_TIMEOUT_S:.0f} s"


class CountingCompiler:
    def __init__(self, **limits: int) -> None:
        self.num_calls = 0
        self._limits = LLParserLimits(verbose_errors=False, **limits)

    def __call__(self, tokenizer: LLTokenizer, wanted: StructuredOutputs) -> LLMatcher:
        self.num_calls += 1
        assert wanted.kind is REGEX
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(wanted.spec), log_level=0, limits=self._limits)
        check_matcher(matcher)
        return matcher


def test_equal_grammars_are_compiled_once_and_a_worn_one_anew(
    make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer
) -> None:
    engine, compiler = make_engine(), CountingCompiler()
    replace_grammars(engine, Grammars(grammar_tokenizer, compile_=compiler))
    expected = make_engine().run([structured(i, REGEX, "[a-z]{5,9}", seed=i) for i in range(10)])
    assert engine.run([structured(i, REGEX, "[a-z]{5,9}", seed=i) for i in range(10)]) == expected
    engine.run([structured(20, REGEX, "[a-z]{5,9}"), structured(21, REGEX, "[a-y]{5,9}")])
    assert compiler.num_calls == 2
    engine.run([structured(30 + i, REGEX, "[a-z]{2}") for i in range(MAX_COPIES + 1)])
    assert compiler.num_calls == 4


# Each request visits states of its own: where and how many a's come decides what may follow 12 letters later.
STATEFUL = "[ab]{0,30}a[ab]{12}c"


def test_a_copy_that_runs_out_of_lexer_states_begins_anew_by_itself(
    make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer
) -> None:
    requests = [structured(i, REGEX, STATEFUL, seed=i) for i in range(12)]
    expected = make_engine().run(requests)
    engine, compiler = make_engine(), CountingCompiler(max_lexer_states=150)
    replace_grammars(engine, Grammars(grammar_tokenizer, compile_=compiler))
    # One that fails at its very last token learns only from an EOS that it is at its end.
    assert {i: tokens[: len(expected[i])] for i, tokens in engine.run(requests).items()} == expected
    assert compiler.num_calls > 1


def test_one_that_runs_out_of_them_by_itself_fails(make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer) -> None:
    engine, compiler = make_engine(), CountingCompiler(max_lexer_states=30)
    replace_grammars(engine, Grammars(grammar_tokenizer, compile_=compiler))
    errors = errors_of(engine, structured(1, REGEX, STATEFUL), make_request(2, PROMPT))
    assert "too many states" in str(errors[1])
    assert errors[2] is None


def test_a_compiler_that_stumbles_is_not_the_engine_s_death(
    make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer
) -> None:
    engine = make_engine()
    replace_grammars(engine, Grammars(grammar_tokenizer, compile_=CountingCompiler()))
    errors = errors_of(engine, structured(1, CHOICE, '["a"]'), structured(2, REGEX, "a"))
    assert str(errors[1]).startswith("structured_outputs: AssertionError")
    assert errors[2] is None


class RecordingGrammars(Grammars):
    last: StepGrammars

    def begin(self, batch: SchedulerOutput) -> StepGrammars:
        self.last = super().begin(batch)
        return self.last


def test_masks_are_made_while_the_model_computes(
    make_engine: Callable[..., Engine], grammar_tokenizer: LLTokenizer, alone: list[int]
) -> None:
    engine, num_overlapped = make_engine(), 0
    grammars = RecordingGrammars(grammar_tokenizer)
    replace_grammars(engine, grammars)
    parts = engine.runner._parts
    assert parts is not None
    model = parts.loaded.model

    def forward(**inputs: Any) -> Any:
        """Computes nothing before the masks of its step are there: made afterwards, they would never come."""
        nonlocal num_overlapped
        if (masks := grammars.last._masks) is not None:
            assert not wait([masks], DEADLINE_S).not_done
            num_overlapped += 1
        return model(**inputs)

    engine.runner._parts = dataclasses.replace(parts, lean=None, loaded=dataclasses.replace(parts.loaded, model=forward))
    assert engine.run([person()])[1] == alone
    assert num_overlapped >= len(alone) - 1

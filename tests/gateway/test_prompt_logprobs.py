"""Log-probabilities of prompts on their way from engines to readers and into answers."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from cores.messages import EngineCoreOutputs, Finished, FinishReason, PromptLogprobsChunk, RankId, RankLoad
from cores.sampling_params import RequestOutputKind, SamplingParams
from cores.testing import make_tiny_tokenizer
from gateway.errors import EngineGenerateError
from gateway.logprobs import PromptLogprobs
from gateway.output_collector import RequestOutputCollector
from gateway.output_processor import OutputProcessor
from gateway.outputs import CompletionOutput, RequestOutput, RequestStats
from gateway.parallel_sampling import ParentRequest
from gateway.request_state import RequestStream
from gateway.server.answers import CHAT, COMPLETION, Answer, whole_answer
from gateway.server.sse import StreamEncoder
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
PROMPT = TOKENIZER.encode("the way of é!", False)
NUM_TOP = 2
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
LENGTH = Finished(FinishReason.LENGTH)


def chunk(start: int, end: int, num_top: int = NUM_TOP) -> PromptLogprobsChunk:
    """Of positions `start` … `end` - 1, each with numbers of its own."""
    positions = range(start, end)
    return PromptLogprobsChunk(
        start,
        num_top,
        array("f", [-p / 2 for p in positions]),
        array("I", [10 + p for p in positions]),
        array("I", [3 + p + i for p in positions for i in range(num_top)]),
        array("f", [-p / 4 - i for p in positions for i in range(num_top)]),
    )


def whole() -> PromptLogprobs:
    known = PromptLogprobs(TOKENIZER, PROMPT, NUM_TOP)
    known.add(chunk(1, len(PROMPT)))
    return known


# --- the collection ---------------------------------------------------------------------------------------------------


def test_they_read_like_a_list_whose_first_is_none() -> None:
    known = whole()
    assert len(known) == len(PROMPT)
    assert known[0] is None
    position = known[2]
    assert position is not None
    assert position == known[2 - len(PROMPT)]
    assert (position.chosen.token_id, position.chosen.logprob, position.chosen.rank) == (PROMPT[2], -1.0, 12)
    assert [(t.token_id, t.logprob, t.rank) for t in position.top] == [(5, -0.5, 1), (6, -1.5, 2)]
    assert known[1:3] == [known[1], known[2]]
    assert [p is None for p in known] == [True] + [False] * (len(PROMPT) - 1)
    with pytest.raises(IndexError):
        known[len(PROMPT)]


def test_parts_in_order_are_the_whole_also_if_an_engine_begins_anew() -> None:
    known = PromptLogprobs(TOKENIZER, PROMPT, NUM_TOP)
    for start, end in ((1, 3), (3, 5), (1, 2), (2, len(PROMPT) - 1)):
        known.add(chunk(start, end))
        assert not known.is_complete
    known.add(chunk(len(PROMPT) - 1, len(PROMPT)))
    assert known.is_complete
    assert known[:] == whole()[:]
    assert PromptLogprobs(TOKENIZER, PROMPT[:1], NUM_TOP).is_complete


@pytest.mark.parametrize(
    "wrong", [chunk(2, 4), chunk(0, 2), chunk(1, len(PROMPT) + 1), chunk(1, 3, num_top=1)], ids=["gap", "start", "end", "top"]
)
def test_a_part_that_fits_nowhere_is_refused(wrong: PromptLogprobsChunk) -> None:
    with pytest.raises(ValueError, match="fit no prompt"):
        PromptLogprobs(TOKENIZER, PROMPT, NUM_TOP).add(wrong)


# --- through the output processor -------------------------------------------------------------------------------------


class Reader:
    def __init__(self, kind: RequestOutputKind, n: int = 1, num_top: int | None = NUM_TOP) -> None:
        self.processor = OutputProcessor(TOKENIZER)
        self.collector = RequestOutputCollector(kind)
        params = SamplingParams(n=n, seed=1, output_kind=kind, prompt_logprobs=num_top)
        parent = ParentRequest("r", params) if n > 1 else None
        stream = RequestStream(
            external_id="r", internal_id="r", prompt=None, prompt_token_ids=PROMPT, params=params, sink=self.collector,
            arrival_s=0.0, parent=parent,
        )  # fmt: skip
        for index in range(n):
            child_params = params if parent is None else parent.child_params(index)
            self.processor.add_sequence(stream, handle=index + 1, index=index, params=child_params)

    def feed(self, rows: list[tuple[int, str]], **extras: Any) -> RequestOutput | None:
        """Rows are (handle, text of the new token or nothing). What the reader finds."""
        ids = [TOKENIZER.encode(text, False) for _, text in rows]
        outputs = EngineCoreOutputs(
            rank_id=RankId(3, 1), step=1, command_seq=0, load=RankLoad(), handles=array("I", [handle for handle, _ in rows]),
            token_ids=array("I", [i for row in ids for i in row]), counts=array("I", map(len, ids)), **extras,
        )  # fmt: skip
        for _ in self.processor.process(outputs, 128, 0.0):
            pass
        self.processor.check_invariants()
        return self.collector.get_nowait()


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_a_reader_finds_them_from_the_first_token_on(kind: RequestOutputKind) -> None:
    reader = Reader(kind)
    assert reader.feed([(1, "")], prompt_logprobs={0: chunk(1, 4)}) is None
    first = reader.feed([(1, "a")], prompt_logprobs={0: chunk(4, len(PROMPT))})
    second = reader.feed([(1, "b")])
    last = reader.feed([(1, "c")], finished={0: LENGTH})
    for output in (first, second, last):
        assert output is not None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[:] == whole()[:]


def test_they_are_not_lost_when_the_first_token_has_no_text_yet_or_nobody_reads() -> None:
    reader = Reader(DELTA)
    half = TOKENIZER.encode("é", False)[:1]
    outputs = EngineCoreOutputs(
        rank_id=RankId(3, 1), step=1, command_seq=0, load=RankLoad(), handles=array("I", [1]), token_ids=array("I", half),
        prompt_logprobs={0: chunk(1, len(PROMPT))},
    )  # fmt: skip
    assert list(reader.processor.process(outputs, 128, 0.0))
    assert reader.collector.get_nowait() is None
    output = reader.feed([(1, "a")])
    assert output is not None
    assert output.prompt_logprobs is not None


def test_with_several_sequences_one_asks_for_all_unless_they_stream() -> None:
    params = SamplingParams(n=3, seed=1, prompt_logprobs=1, output_kind=FINAL_ONLY)
    assert [ParentRequest("r", params).child_params(i).prompt_logprobs for i in range(3)] == [1, None, None]
    streamed = SamplingParams(n=2, seed=1, prompt_logprobs=1, output_kind=DELTA)
    assert [ParentRequest("r", streamed).child_params(i).prompt_logprobs for i in range(2)] == [1, 1]
    reader = Reader(FINAL_ONLY, n=2)
    assert reader.feed([(2, "x")], finished={0: LENGTH}) is None
    output = reader.feed([(1, "a")], prompt_logprobs={0: chunk(1, len(PROMPT))}, finished={0: LENGTH})
    assert output is not None
    assert [completion.text for completion in output.outputs] == ["a", "x"]
    assert output.prompt_logprobs is not None


@pytest.mark.parametrize("extras", [{}, {"prompt_logprobs": {0: chunk(1, 3)}}, {"prompt_logprobs": {0: chunk(2, 3)}}])
def test_an_engine_that_owes_them_fails_the_request(extras: dict[str, Any]) -> None:
    reader = Reader(DELTA)
    with pytest.raises(EngineGenerateError, match="rank 3"):
        reader.feed([(1, "a")], **extras)


def test_those_nobody_asked_for_are_dropped() -> None:
    output = Reader(DELTA, num_top=None).feed([(1, "a")], prompt_logprobs={0: chunk(1, 3)})
    assert output is not None
    assert output.prompt_logprobs is None


# --- in answers -------------------------------------------------------------------------------------------------------


def answer(**fields: Any) -> Answer:
    return Answer(**{"id": "id", "model": "m", "created": 7, "prompt_token_ids": (PROMPT,), **fields})


def output(*completions: CompletionOutput, known: PromptLogprobs | None = None) -> RequestOutput:
    finished = all(completion.finished for completion in completions)
    return RequestOutput("id", None, PROMPT, list(completions), finished, RequestStats(0.0), None, known)


END = CompletionOutput(0, "end", [50], [], "stop")


def test_vllm_s_field_has_the_actual_token_first_and_as_many_others_as_asked_for() -> None:
    final = output(END, known=whole())
    chat = json.loads(whole_answer(CHAT, answer(prompt_logprobs=1), [final]))["prompt_logprobs"]
    (choice,) = json.loads(whole_answer(COMPLETION, answer(prompt_logprobs=1), [final]))["choices"]
    assert choice["prompt_logprobs"] == chat
    assert chat[0] is None
    assert len(chat) == len(PROMPT)
    assert chat[2] == {
        str(PROMPT[2]): {"logprob": -1.0, "rank": 12, "decoded_token": TOKENIZER.token_bytes(PROMPT[2]).decode()},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.token_bytes(5).decode()},
    }
    assert "prompt_logprobs" not in json.loads(whole_answer(CHAT, answer(), [final]))
    aborted = json.loads(whole_answer(CHAT, answer(prompt_logprobs=1), [output(END)]))
    assert aborted["prompt_logprobs"] is None


def echo_answer(num_top: int = 1) -> Answer:
    return answer(echo=("the way of é!",), echo_logprobs=num_top)


def test_an_echoed_prompt_has_its_own_in_front_of_the_output_s() -> None:
    known = whole()
    output_position = known[1]
    assert output_position is not None
    end = CompletionOutput(0, "x", [PROMPT[1]], [output_position], "length")
    (choice,) = json.loads(whole_answer(COMPLETION, echo_answer(), [output(end, known=known)]))["choices"]
    columns = choice["logprobs"]
    assert choice["text"] == "the way of é!x"
    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, len(PROMPT) + 1)
    assert (columns["tokens"][0], columns["token_logprobs"][0], columns["top_logprobs"][0]) == (known.first_text, None, None)
    assert columns["token_logprobs"][1:3] == [-0.5, -1.0]
    assert len(columns["top_logprobs"][2]) == 2, "one alternative, and the token itself"
    assert columns["text_offset"][:2] == [0, len(known.first_text)]
    assert columns["text_offset"][-1] == len("the way of é!")


def test_a_streamed_echo_waits_for_them_and_says_the_same() -> None:
    known = whole()
    encoder = StreamEncoder(COMPLETION, echo_answer())
    assert encoder.open() == b""
    assert encoder.is_slow
    end = CompletionOutput(0, "x", [PROMPT[1]], [known[1:2][0]], "length")  # type: ignore[list-item]  # not None
    data = encoder.encode(output(end, known=known)).decode()
    assert not encoder.is_slow
    opening, last = (json.loads(event.removeprefix("data: "))["choices"][0] for event in data.strip().split("\n\n"))
    (choice,) = json.loads(whole_answer(COMPLETION, echo_answer(), [output(end, known=known)]))["choices"]
    assert opening["text"] + last["text"] == choice["text"]
    joined = {name: column + last["logprobs"][name] for name, column in opening["logprobs"].items()}
    assert joined == choice["logprobs"]


def test_each_streamed_choice_opens_once_and_an_aborted_one_without_them() -> None:
    encoder = StreamEncoder(COMPLETION, answer(echo=("p",), echo_logprobs=0, n=2))
    first = encoder.encode(output(CompletionOutput(1, "a", [50], []), known=whole()))
    assert first.count(b"data: ") == 2
    assert encoder.is_slow
    again = encoder.encode(output(CompletionOutput(1, "b", [50], []), known=whole()))
    assert again.count(b"data: ") == 1
    ends = encoder.encode(output(CompletionOutput(0, "", [], [], "abort"), CompletionOutput(1, "", [], [], "abort")))
    assert ends.count(b"data: ") == 3
    assert encoder.is_finished

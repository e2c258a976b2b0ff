"""What statistics are told of requests, tokens and stays at ranks."""

from __future__ import annotations

import pytest

from cores.messages import Finished, FinishReason, FirstToken
from gateway.errors import EngineDeadError
from gateway.output_processor import OutputProcessor
from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.request_state import RankStay
from tests.gateway.output_harness import (
    EOS,
    LENGTH,
    PROMPT,
    TOKENIZER,
    add_request,
    feed,
    outputs,
    tokens,
)


def test_statistics_of_a_request_are_complete_when_it_ends() -> None:
    finished: list[FinishedRequest] = []
    processor = OutputProcessor(TOKENIZER, on_finished=finished.append)
    add_request(processor, 1)
    feed(processor, outputs([(1, tokens("a"))], rank=4, first_tokens={0: FirstToken(6, 0.25)}), now=11.0)
    feed(processor, outputs([(1, tokens("b"))]), now=11.5)
    feed(processor, outputs([(1, tokens("c"))], first_tokens={0: FirstToken(0, 9.0)}), now=12.0)  # went on at another rank
    feed(processor, outputs([(1, [EOS])], finished={0: Finished(FinishReason.STOP, EOS)}), now=13.0)
    assert finished == [
        FinishedRequest(
            external_id="request",
            internal_id="request-1",
            finish_reason="stop",
            rank=4,
            arrival_s=10.0,
            first_token_s=11.0,
            last_token_s=13.0,
            queued_s=0.25,
            num_sequences=1,
            num_prompt_tokens=len(PROMPT),
            num_cached_tokens=6,
            num_generation_tokens=4,
            num_moves=0,
            max_tokens=100,
            num_longest_tokens=4,
        )
    ]
    assert processor.counters.generation_tokens == 4


def test_the_longest_sequence_is_told_whether_it_came_to_its_end_or_not() -> None:
    finished: list[FinishedRequest] = []
    processor = OutputProcessor(TOKENIZER, on_finished=finished.append)
    for handle in (1, 11):
        add_request(processor, handle, n=2)
        feed(processor, outputs([(handle, tokens("abc")), (handle + 1, tokens("d"))]))
        feed(processor, outputs([(handle, [EOS])], finished={0: Finished(FinishReason.STOP, EOS)}))
        feed(processor, outputs([(handle + 1, tokens("efghi" if handle == 1 else "e"))]))
        processor.abort("request")
    assert [(f.num_sequences, f.num_generation_tokens, f.num_longest_tokens) for f in finished] == [(2, 10, 6), (2, 6, 4)]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_stays_at_ranks_are_kept_where_they_are_wanted(is_wanted: bool) -> None:
    finished: list[FinishedRequest] = []
    processor = OutputProcessor(TOKENIZER, on_finished=finished.append)
    processor.keeps_stays = is_wanted
    add_request(processor, 1)
    processor.set_rank(1, 4, 10.5)
    feed(processor, outputs([(1, tokens("a"))], rank=4, first_tokens={0: FirstToken(6, 0.25)}), now=11.0)
    processor.note_move(1, 12.0)
    processor.set_rank(1, 2, 13.0)
    feed(processor, outputs([(1, tokens("b"))], rank=2, first_tokens={0: FirstToken(0, 9.0)}), now=14.0)
    processor.abort("request")
    stays = (RankStay(1, 4, 10.5, 11.0, 12.0), RankStay(1, 2, 13.0, 14.0))
    assert finished[0].stays == (stays if is_wanted else ())
    assert finished[0].num_moves == 1


@pytest.mark.parametrize("end", ["abort", "error", "length"])
def test_every_end_is_counted_and_reported_once(end: str) -> None:
    finished: list[FinishedRequest] = []
    processor = OutputProcessor(TOKENIZER, on_finished=finished.append)
    add_request(processor, 1)
    match end:
        case "abort":
            processor.abort("request")
        case "error":
            processor.fail([1], EngineDeadError("dead"))
        case "length":
            feed(processor, outputs([(1, tokens("a"))], finished={0: LENGTH}))
    assert [request.finish_reason for request in finished] == [end]
    counters = processor.counters
    assert (counters.finished, counters.aborted, counters.failed) == (end == "length", end == "abort", end == "error")


@pytest.mark.parametrize(
    ("num_tokens", "first_s", "last_s", "queued_s"), [(0, None, None, 0.0), (1, 20.0, 20.0, 0.25), (3, 20.0, 22.0, 0.25)]
)
def test_an_abort_is_reported_with_what_its_request_had_come_to(
    num_tokens: int, first_s: float | None, last_s: float | None, queued_s: float
) -> None:
    """Queued or in prefill, with its first token, or in decode."""
    finished: list[FinishedRequest] = []
    processor = OutputProcessor(TOKENIZER, on_finished=finished.append)
    add_request(processor, 1)
    for i in range(num_tokens):
        first = {} if i else {0: FirstToken(2, 0.25)}
        feed(processor, outputs([(1, tokens("a"))], first_tokens=first), now=20.0 + i)
    processor.abort("request")
    feed(processor, outputs([(1, tokens("a"))]), now=30.0)  # its engine had not heard yet
    (request,) = finished
    assert (request.finish_reason, request.first_token_s, request.last_token_s) == ("abort", first_s, last_s)
    assert (request.queued_s, request.num_generation_tokens) == (queued_s, num_tokens)
    assert processor.counters.prompt_tokens == (len(PROMPT) if num_tokens else 0)  # counted once, at the first token


def test_token_times_are_per_sequence_and_reported_by_slice() -> None:
    slices: list[TokenTimes] = []
    processor = OutputProcessor(TOKENIZER, on_tokens=slices.append)
    add_request(processor, 1, n=2)
    feed(processor, outputs([(1, tokens("a"))], rank=3), now=11.0)
    feed(processor, outputs([(1, tokens("b")), (2, tokens("c"))], rank=3), now=12.0)
    feed(processor, outputs([(1, tokens("d")), (2, tokens("e"))], rank=3), now=14.0)
    assert slices == [
        TokenTimes(3, 1, time_to_first_token_s=[1.0]),
        TokenTimes(3, 2, inter_token_s=[1.0]),
        TokenTimes(3, 2, inter_token_s=[2.0, 2.0]),
    ]


def test_sequences_are_counted_by_adapter_until_their_end(processor: OutputProcessor) -> None:
    add_request(processor, 1, lora_name="sql", n=2, seed=1)
    add_request(processor, 3, lora_name="chat")
    add_request(processor, 4)
    assert processor.count_by_lora() == {"sql": (2, 0), "chat": (1, 0)}
    feed(processor, outputs([(1, [5]), (4, [5])]))
    assert processor.count_by_lora() == {"sql": (1, 1), "chat": (1, 0)}
    processor.abort_all()
    assert processor.count_by_lora() == {}

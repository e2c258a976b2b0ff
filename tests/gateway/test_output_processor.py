"""From step outputs to readers: every kind of stream, every kind of end, and that each request has exactly one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.messages import EngineCoreOutputs, Finished, FinishReason, FirstToken, RankId, RankLoad, TokenLogprobs
from cores.sampling_params import RequestOutputKind, SamplingParams
from cores.testing import make_tiny_tokenizer
from gateway.errors import EngineDeadError, EngineGenerateError, OverloadedError
from gateway.output_processor import OutputProcessor, ProcessedOutputs
from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.outputs import CompletionOutput, RequestOutput, to_pooling_output
from gateway.parallel_sampling import ParentRequest
from gateway.request_state import RankStay
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
EOS = 2
LENGTH = Finished(FinishReason.LENGTH)
PROMPT = TOKENIZER.encode("the prompt", False)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, False)


def outputs(rows: list[tuple[int, list[int]]], *, rank: int = 0, **extras: Any) -> EngineCoreOutputs:
    """Rows are (handle, new tokens)."""
    counts = [len(ids) for _, ids in rows]
    return EngineCoreOutputs(
        rank_id=RankId(rank, 1),
        step=1,
        command_seq=0,
        load=RankLoad(),
        handles=array("I", [handle for handle, _ in rows]),
        token_ids=array("I", [token_id for _, ids in rows for token_id in ids]),
        counts=None if all(count == 1 for count in counts) else array("I", counts),
        **extras,
    )


@dataclass
class RecordingSink:
    """Keeps what it is given and holds the processor to its promise: nothing after the end."""

    outputs: list[RequestOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.error is not None or any(output.finished for output in self.outputs)

    def put(self, output: RequestOutput) -> None:
        assert not self.has_ended
        self.outputs.append(output)

    def put_error(self, error: Exception) -> None:
        assert not self.has_ended
        self.error = error

    def completions(self, index: int = 0) -> list[CompletionOutput]:
        return [c for output in self.outputs for c in output.outputs if c.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(completion.text for completion in self.completions(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for completion in self.completions(index) for token_id in completion.token_ids]


Add = Callable[..., RecordingSink]


@pytest.fixture
def processor() -> Iterator[OutputProcessor]:
    processor = OutputProcessor(TOKENIZER)
    yield processor
    processor.check_invariants()


def add_request(
    processor: OutputProcessor,
    handle: int,
    *,
    name: str | None = None,
    external_id: str = "request",
    lora_name: str | None = None,
    tenant: str | None = None,
    **params: Any,
) -> RecordingSink:
    """Registers a request; its children have handles from `handle` on."""
    sink = RecordingSink()
    settings = SamplingParams(**{"output_kind": DELTA, "seed": 1, "max_tokens": 100} | params)
    internal_id = name or f"request-{handle}"
    parent = ParentRequest(internal_id, settings) if settings.n > 1 else None
    for index in range(settings.n):
        processor.add_request(
            handle=handle + index,
            external_id=external_id,
            internal_id=internal_id,
            prompt_text="the prompt",
            prompt_token_ids=PROMPT,
            params=parent.child_params(index) if parent else settings,
            sink=sink,
            parent=parent,
            index=index,
            arrival_s=10.0,
            lora_name=lora_name,
            tenant=tenant,
        )
    return sink


def feed(processor: OutputProcessor, batch: EngineCoreOutputs, now: float = 11.0) -> ProcessedOutputs:
    (done,) = processor.process(batch, 128, now)
    processor.check_invariants()
    return done


def feed_text(processor: OutputProcessor, handle: int, text: str) -> None:
    for token_id in tokens(text):
        feed(processor, outputs([(handle, [token_id])]))


# --- one sequence -----------------------------------------------------------------------------------------------------


def test_deltas_joined_are_the_whole_and_the_last_one_alone_is_finished(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1)
    ids = tokens("the café 🙂")
    for token_id in ids[:-1]:
        feed(processor, outputs([(1, [token_id])]))
    done = feed(processor, outputs([(1, [ids[-1]])], finished={0: LENGTH}))
    assert (sink.text(), sink.token_ids()) == ("the café 🙂", ids)
    assert [output.finished for output in sink.outputs].count(True) == 1
    assert sink.outputs[-1].finished
    assert sink.completions()[-1].finish_reason == "length"
    assert done == ProcessedOutputs(abort_handles=[], finished_handles=[1], num_tokens=1)
    assert processor.num_unfinished == 0


def test_outputs_say_whose_they_are(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1)
    processor.set_rank(1, 3, 10.0)
    processor.set_rank(1, 4, 11.0)  # it went on elsewhere: readers keep the first
    processor.set_rank(99, 4, 11.0)
    feed(processor, outputs([(1, tokens("a"))]))
    (output,) = sink.outputs
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.rank) == ("request", "the prompt", PROMPT, 3)


def test_a_held_back_token_makes_no_empty_output(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1)
    feed_text(processor, 1, "日")
    assert [c.text for c in sink.completions()] == ["日"]


def test_cumulative_outputs_hold_all_so_far(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, output_kind=CUMULATIVE)
    feed_text(processor, 1, "abé")
    feed(processor, outputs([(1, [])], finished={0: LENGTH}))
    assert [c.text for c in sink.completions()] == ["a", "ab", "abé", "abé"]
    assert [c.token_ids for c in sink.completions()] == [tokens("a"), tokens("ab"), tokens("abé"), tokens("abé")]


def test_final_only_is_one_output(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, output_kind=FINAL_ONLY)
    feed_text(processor, 1, "abc")
    assert sink.outputs == []
    feed(processor, outputs([(1, tokens("d"))], finished={0: LENGTH}))
    assert [(c.text, c.token_ids) for c in sink.completions()] == [("abcd", tokens("abcd"))]


def test_several_tokens_in_one_row_come_as_one_output(processor: OutputProcessor) -> None:
    sink, other = add_request(processor, 1), add_request(processor, 2)
    done = feed(processor, outputs([(1, tokens("abc")), (2, tokens("d"))]))
    assert [c.text for c in sink.completions()] == ["abc"]
    assert other.text() == "d"
    assert done.num_tokens == 4


def test_eos_has_an_id_but_neither_text_nor_stop_reason(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, skip_special_tokens=False)
    feed_text(processor, 1, "a")
    feed(processor, outputs([(1, [EOS])], finished={0: Finished(FinishReason.STOP, EOS)}))
    last = sink.completions()[-1]
    assert (sink.text(), sink.token_ids()) == ("a", [*tokens("a"), EOS])
    assert (last.finish_reason, last.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_shows_its_text_only_if_asked_to(processor: OutputProcessor, include: bool, text: str) -> None:
    (stop,) = tokens("b")
    sink = add_request(processor, 1, stop_token_ids=(stop,), include_stop_str_in_output=include)
    feed_text(processor, 1, "a")
    feed(processor, outputs([(1, [stop])], finished={0: Finished(FinishReason.STOP, stop)}))
    assert (sink.text(), sink.token_ids()) == (text, tokens("ab"))
    assert sink.completions()[-1].stop_reason == stop


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_a_stop_string_ends_the_request_and_tells_the_engine(processor: OutputProcessor, kind: RequestOutputKind) -> None:
    sink = add_request(processor, 1, stop=("<end>",), output_kind=kind)
    feed_text(processor, 1, "ab<end")
    done = feed(processor, outputs([(1, tokens(">"))]))
    late = feed(processor, outputs([(1, tokens("c"))]))  # the engine's next step was under way
    last = sink.completions()[-1]
    assert (done.abort_handles, done.finished_handles) == ([1], [])
    assert (last.finish_reason, last.stop_reason) == ("stop", "<end>")
    assert (sink.text() if kind is DELTA else last.text) == "ab"
    assert (sink.token_ids() if kind is DELTA else last.token_ids) == tokens("ab<end>")
    assert (late.num_tokens, processor.counters.stray_outputs) == (0, 1)


def test_a_stop_string_in_the_last_token_needs_no_abort(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, stop=("b",))
    feed_text(processor, 1, "a")
    done = feed(processor, outputs([(1, tokens("b"))], finished={0: LENGTH}))
    assert (done.abort_handles, done.finished_handles) == ([], [1])
    assert (sink.completions()[-1].finish_reason, sink.completions()[-1].stop_reason) == ("stop", "b")


def test_tokens_behind_a_stop_string_in_the_same_row_do_not_count(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, stop=("b",))
    done = feed(processor, outputs([(1, tokens("abcd"))]))
    assert (sink.text(), sink.token_ids()) == ("a", tokens("ab"))
    assert (done.num_tokens, sink.outputs[-1].stats.num_generation_tokens) == (2, 2)


def test_a_stop_string_before_min_tokens_is_text(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, stop=("b",), min_tokens=2)
    feed_text(processor, 1, "abcb")
    assert (sink.text(), sink.completions()[-1].stop_reason) == ("abc", "b")


def test_held_back_text_comes_with_the_end(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, stop=("<end>",))
    feed_text(processor, 1, "a<en")
    assert sink.text() == "a"
    feed(processor, outputs([(1, tokens("日")[:1])], finished={0: LENGTH}))
    assert sink.text() == "a<en\ufffd"
    assert sink.token_ids() == [*tokens("a<en"), tokens("日")[0]]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-token_id / 100, 1, (token_id,), (-token_id / 100,))


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_logprobs_stay_in_step_with_ids(processor: OutputProcessor, kind: RequestOutputKind) -> None:
    sink = add_request(processor, 1, logprobs=1, output_kind=kind, stop=("<end>",))
    ids = tokens("é<en!")
    for i, token_id in enumerate(ids):
        finished = {0: LENGTH} if i == len(ids) - 1 else {}
        feed(processor, outputs([(1, [token_id])], logprobs={0: [entry(token_id)]}, finished=finished))
    for completion in sink.completions():
        assert completion.logprobs is not None
        assert [position.chosen.token_id for position in completion.logprobs] == completion.token_ids
    whole = sink.token_ids() if kind is DELTA else sink.completions()[-1].token_ids
    assert whole == ids


def test_logprobs_nobody_asked_for_are_dropped(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1)
    (token_id,) = tokens("a")
    feed(processor, outputs([(1, [token_id])], logprobs={0: [entry(token_id)]}))
    assert sink.completions()[0].logprobs is None


def test_an_engine_that_owes_logprobs_fails_the_request(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, logprobs=1)
    done = feed(processor, outputs([(1, tokens("a"))], rank=5))
    assert (done.abort_handles, done.finished_handles) == ([1], [])
    assert isinstance(sink.error, EngineGenerateError)
    assert "rank 5" in str(sink.error)


def test_a_bug_that_one_row_meets_costs_one_request_and_no_other(processor: OutputProcessor) -> None:
    sinks = [add_request(processor, handle) for handle in range(1, 17)]
    several = add_request(processor, 20, n=3)
    rows = [(handle, tokens("a")) for handle in (*range(1, 17), 20, 21, 22)]
    feed(processor, outputs(rows))

    def broken(token_id: int) -> Any:
        raise ZeroDivisionError("a bug")

    processor._states[5].push_one = broken
    processor._states[21].push_one = broken
    (done,) = processor.process(outputs(rows), 128, 2.0)
    assert sorted(done.abort_handles) == [5, 20, 21, 22]
    assert done.finished_handles == []
    for failed in (sinks[4], several):
        assert isinstance(failed.error, EngineGenerateError)
        assert "ZeroDivisionError: a bug" in str(failed.error)
    assert [sink.text() for i, sink in enumerate(sinks) if i != 4] == ["aa"] * 15
    assert (processor.num_unfinished, processor.counters.failed) == (15, 2)
    feed(processor, outputs([(handle, tokens("b")) for handle in range(1, 17)]))
    assert [sink.text() for i, sink in enumerate(sinks) if i != 4] == ["aab"] * 15


# --- several sequences ------------------------------------------------------------------------------------------------


def test_children_stream_under_their_index_and_the_last_end_finishes(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, n=2)
    feed(processor, outputs([(1, tokens("a")), (2, tokens("b"))]))
    feed(processor, outputs([(1, tokens("c")), (2, tokens("d"))], finished={1: LENGTH}))
    assert processor.handles_of("request-1") == [1]
    feed(processor, outputs([(1, tokens("e"))], finished={0: LENGTH}))
    assert (sink.text(0), sink.text(1)) == ("ace", "bd")
    assert [output.finished for output in sink.outputs] == [False] * 4 + [True]
    assert sink.outputs[-1].stats.num_generation_tokens == 5
    assert (processor.counters.finished_length, processor.counters.prompt_tokens) == (1, len(PROMPT))


def test_final_only_waits_for_all_children(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, n=2, output_kind=FINAL_ONLY)
    feed(processor, outputs([(1, tokens("a")), (2, tokens("b"))], finished={1: LENGTH}))
    assert sink.outputs == []
    feed(processor, outputs([(1, tokens("c"))], finished={0: Finished(FinishReason.STOP, tokens("c")[0])}))
    (output,) = sink.outputs
    assert output.finished
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "a", "stop"), (1, "b", "length")]


def test_an_error_of_one_child_fails_the_request_and_aborts_its_siblings(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, n=3)
    other = add_request(processor, 9)
    finished = {0: Finished(FinishReason.ERROR, error="NaN in the logits")}
    done = feed(processor, outputs([(2, []), (1, tokens("a")), (9, tokens("b"))], finished=finished))
    assert (done.abort_handles, done.finished_handles) == ([1, 3], [2])
    assert str(sink.error) == "NaN in the logits"
    assert other.text() == "b"
    assert processor.counters.failed == 1


def test_a_vector_ends_its_request_and_counts_its_prompt(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, output_kind=FINAL_ONLY)
    row = outputs([(1, [])], finished={0: Finished(FinishReason.STOP)})
    row.vectors[0] = b"\0\0\x80\x3f"
    done = feed(processor, row)
    (output,) = sink.outputs
    assert (output.finished, output.outputs[0].vector, output.outputs[0].text) == (True, b"\0\0\x80\x3f", "")
    assert to_pooling_output(output).values == [1.0]
    assert done.finished_handles == [1]
    assert (processor.counters.finished_stop, processor.counters.prompt_tokens) == (1, len(output.prompt_token_ids))


def test_an_aborted_request_has_no_vector_and_may_come_again(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, output_kind=FINAL_ONLY)
    processor.abort("request")
    with pytest.raises(OverloadedError, match="abort"):
        to_pooling_output(sink.outputs[0])


def test_a_request_that_came_too_late_to_a_rank_may_come_again(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1)
    done = feed(processor, outputs([(1, [])], finished={0: Finished(FinishReason.REJECTED, error="the engine is paused")}))
    assert isinstance(sink.error, OverloadedError)
    assert str(sink.error) == "rank 0 (epoch 1): the engine is paused"
    assert (done.abort_handles, done.finished_handles) == ([], [1])


def test_a_dead_rank_names_the_siblings_that_run_elsewhere(processor: OutputProcessor) -> None:
    sink, other = add_request(processor, 1, n=3), add_request(processor, 9)
    error = EngineDeadError("rank 0 died", 0)
    assert processor.fail([2, 77], error) == [1, 3]
    assert sink.error is error
    assert not other.has_ended
    assert processor.fail([2], error) == []


# --- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["request", "request-1"], ids=["external id", "internal id"])
@pytest.mark.parametrize("text", ["", "ab", "ab<en"], ids=["before the first token", "decoding", "with text held back"])
@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_abort_ends_the_stream_with_what_there_is(
    processor: OutputProcessor, kind: RequestOutputKind, text: str, request_id: str
) -> None:
    sink = add_request(processor, 1, output_kind=kind, stop=("<end>",))
    feed_text(processor, 1, text)
    assert processor.abort(request_id) == [1]
    last = sink.completions()[-1]
    assert (last.finish_reason, last.stop_reason, sink.outputs[-1].finished) == ("abort", None, True)
    assert (sink.text() if kind is DELTA else last.text) == text
    assert (sink.token_ids() if kind is DELTA else last.token_ids) == tokens(text)
    assert (processor.counters.aborted, processor.num_unfinished) == (1, 0)
    assert processor.abort(request_id) == []
    feed(processor, outputs([(1, tokens("c"))]))
    assert processor.counters.stray_outputs == 1


def test_abort_by_external_id_ends_all_requests_that_share_it(processor: OutputProcessor) -> None:
    sinks = [add_request(processor, handle) for handle in (1, 2)]
    other = add_request(processor, 3, external_id="other")
    assert processor.abort("request") == [1, 2]
    assert all(sink.has_ended for sink in sinks)
    assert not other.has_ended


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_abort_takes_all_children_and_keeps_those_that_had_ended(processor: OutputProcessor, kind: RequestOutputKind) -> None:
    sink = add_request(processor, 1, n=3, output_kind=kind)
    feed(processor, outputs([(1, tokens("a")), (2, tokens("b"))], finished={1: LENGTH}))
    assert processor.abort("request") == [1, 3]
    last = sink.outputs[-1]
    reasons = {c.index: c.finish_reason for c in last.outputs}
    assert reasons == ({0: "abort", 2: "abort"} if kind is DELTA else {0: "abort", 1: "length", 2: "abort"})
    assert last.finished
    assert (sink.text(0), sink.text(1), sink.text(2)) == ("a", "b", "")


def test_an_abort_for_a_tenant_leaves_others_requests_of_that_id_alone() -> None:
    processor = OutputProcessor(TOKENIZER)
    sinks = [add_request(processor, handle, name=f"request-{handle}", tenant=tenant) for handle, tenant in ((1, "a"), (2, "b"))]
    assert processor.abort("request", "c") == []
    assert processor.abort("request", "a") == [1]
    assert [sink.has_ended for sink in sinks] == [True, False]
    assert processor.abort("request") == [2]
    processor.check_invariants()


def test_an_id_can_be_used_again_after_abort(processor: OutputProcessor) -> None:
    add_request(processor, 1, name="same")
    processor.abort("same")
    sink = add_request(processor, 2, name="same")
    feed(processor, outputs([(1, tokens("a")), (2, tokens("b"))]))
    assert sink.text() == "b"


def test_unknown_ids_and_handles_are_no_ops(processor: OutputProcessor) -> None:
    assert processor.abort("nobody") == []
    assert processor.handles_of("nobody") == []
    processor.remove([5])
    assert processor.fail([5], EngineDeadError("dead")) == []


def test_an_abort_by_the_engine_is_an_end_like_any_other(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1)
    done = feed(processor, outputs([(1, [])], finished={0: Finished(FinishReason.ABORT)}))
    assert sink.completions()[-1].finish_reason == "abort"
    assert (done.abort_handles, done.finished_handles) == ([], [1])
    assert processor.counters.aborted == 1


# --- errors and rollback ----------------------------------------------------------------------------------------------


def test_an_error_reaches_its_own_request_only(processor: OutputProcessor) -> None:
    sink, other = add_request(processor, 1), add_request(processor, 2)
    feed(processor, outputs([(1, []), (2, tokens("a"))], finished={0: Finished(FinishReason.ERROR)}))
    assert isinstance(sink.error, EngineGenerateError)
    assert "gave no reason" in str(sink.error)
    assert other.text() == "a"


def test_a_removed_request_leaves_no_trace(processor: OutputProcessor) -> None:
    sink = add_request(processor, 1, n=2)
    processor.remove([1, 2])
    assert (sink.outputs, sink.error, processor.num_unfinished) == ([], None, 0)
    assert processor.counters == type(processor.counters)()


def test_fail_all_ends_every_request_once(processor: OutputProcessor) -> None:
    sinks = [add_request(processor, 1), add_request(processor, 2, n=3)]
    error = EngineDeadError("no rank is left")
    processor.fail_all(error)
    processor.fail_all(error)
    assert [sink.error for sink in sinks] == [error, error]
    assert (processor.num_unfinished, processor.counters.failed) == (0, 2)


# --- slices -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_handled_in_slices_between_which_requests_come_and_go(processor: OutputProcessor) -> None:
    sinks = [add_request(processor, handle, external_id=str(handle)) for handle in range(5)]
    slices = processor.process(outputs([(h, tokens("ab")) for h in range(4)] + [(4, tokens("a"))]), 2, 1.0)
    assert next(slices).num_tokens == 4
    processor.abort("2")
    add_request(processor, 7)
    assert [done.num_tokens for done in slices] == [2, 1]
    assert [sink.text() for sink in sinks] == ["ab", "ab", "", "ab", "a"]
    assert processor.counters.stray_outputs == 1


def test_an_empty_batch_has_no_slices(processor: OutputProcessor) -> None:
    assert list(processor.process(outputs([]), 128, 1.0)) == []


# --- statistics -------------------------------------------------------------------------------------------------------


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
        )
    ]
    assert processor.counters.generation_tokens == 4


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


# --- any order of anything --------------------------------------------------------------------------------------------

ALPHABET = [*tokens("ab<é"), EOS]
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3), st.sampled_from([DELTA, CUMULATIVE, FINAL_ONLY]), st.booleans()),
        st.tuples(st.just("step"), st.integers(0, 2**32), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(operations, st.randoms(use_true_random=False))
def test_every_request_has_exactly_one_end_or_was_removed(steps: list[tuple[Any, ...]], rng: Any) -> None:
    """`RecordingSink` fails on anything that comes after the end."""
    processor = OutputProcessor(TOKENIZER)
    sinks: dict[int, RecordingSink] = {}  # by first handle
    in_engine: dict[int, int] = {}  # handles an engine would still serve, with the first handle of their request
    removed: set[int] = set()
    sent: dict[int, list[int]] = {}  # tokens by handle
    lossless: dict[int, int] = {}  # n of the delta streams that no stop string can cut, by first handle
    next_handle = 0

    def forget(handles: list[int]) -> None:
        for handle in handles:
            in_engine.pop(handle, None)

    for step in steps:
        match step:
            case ("add", n, kind, stops):
                stop = {"stop": ("ab", "<")} if stops else {}
                sinks[next_handle] = add_request(processor, next_handle, name=f"i{next_handle}", n=n, output_kind=kind, **stop)
                if kind is DELTA and not stops:
                    lossless[next_handle] = n
                in_engine |= dict.fromkeys(range(next_handle, next_handle + n), next_handle)
                next_handle += n
            case ("step", _, chunk_size):
                rows = [(handle, rng.choices(ALPHABET, k=rng.randint(0, 2))) for handle in in_engine]
                reasons = {i: Finished(rng.choice(list(FinishReason))) for i in range(len(rows)) if rng.random() < 0.2}
                for done in processor.process(outputs(rows, finished=reasons), chunk_size, 1.0):
                    assert not set(done.abort_handles) & set(done.finished_handles)
                    forget([*done.abort_handles, *done.finished_handles])
                    processor.check_invariants()
                for handle, ids in rows:
                    sent[handle] = sent.get(handle, []) + ids
            case ("abort", k):
                forget(processor.abort(f"i{k}"))
            case ("fail", k):
                forget([k, *processor.fail([k], EngineDeadError("dead"))])
            case ("remove", k):
                if k in in_engine:
                    removed.add(in_engine[k])
                    forget(processor.handles_of(f"i{in_engine[k]}"))
                    processor.remove([k])
        processor.check_invariants()
        assert processor.num_unfinished == len(in_engine), "engines and front end disagree"
    processor.fail_all(EngineDeadError("the end"))
    assert processor.num_unfinished == 0
    for first_handle, sink in sinks.items():
        assert sink.has_ended == (first_handle not in removed)
        if first_handle in lossless:
            for index in range(lossless[first_handle]):
                got, whole = sink.token_ids(index), sent.get(first_handle + index, [])
                # An error ends all siblings, whose rows may be behind it in the batch.
                assert got == (whole if sink.error is None and first_handle not in removed else whole[: len(got)])
    assert processor.counters.finished + processor.counters.aborted + processor.counters.failed == len(sinks) - len(removed)


def test_sequences_are_counted_by_adapter_until_their_end(processor: OutputProcessor) -> None:
    add_request(processor, 1, lora_name="sql", n=2, seed=1)
    add_request(processor, 3, lora_name="chat")
    add_request(processor, 4)
    assert processor.count_by_lora() == {"sql": (2, 0), "chat": (1, 0)}
    feed(processor, outputs([(1, [5]), (4, [5])]))
    assert processor.count_by_lora() == {"sql": (1, 1), "chat": (1, 0)}
    processor.abort_all()
    assert processor.count_by_lora() == {}

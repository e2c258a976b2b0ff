"""From step outputs to readers: every kind of stream, every kind of end."""

from __future__ import annotations

from typing import Any

import pytest

from cores.messages import Finished, FinishReason, TokenLogprobs
from cores.sampling_params import RequestOutputKind
from gateway.errors import EngineDeadError, EngineGenerateError, OverloadedError
from gateway.output_processor import OutputProcessor, ProcessedOutputs
from gateway.outputs import to_pooling_output
from tests.gateway.output_harness import (
    CUMULATIVE,
    DELTA,
    EOS,
    FINAL_ONLY,
    LENGTH,
    PROMPT,
    TOKENIZER,
    add_request,
    feed,
    feed_text,
    outputs,
    tokens,
)

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

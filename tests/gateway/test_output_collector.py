"""The slot between the output handler and a request's reader."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.sampling_params import RequestOutputKind
from gateway.errors import EngineGenerateError
from gateway.output_collector import NUM_PLAIN_TOKENS, RequestOutputCollector
from gateway.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, RequestStats

TIMEOUT_S = 60.0  # of waits that a bug would make endless
DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def make_output(*completions: CompletionOutput, finished: bool = False, rank: int | None = None) -> RequestOutput:
    return RequestOutput("request", None, [1], list(completions), finished, RequestStats(0.0), rank)


def delta(text: str, *ids: int, index: int = 0, **fields: object) -> CompletionOutput:
    return CompletionOutput(index, text, list(ids), **fields)  # type: ignore[arg-type]


def logprob(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(Logprob(token_id, -1.0, 1, "x", b"x"), ())


@pytest.fixture(params=[DELTA, CUMULATIVE], ids=["delta", "cumulative"])
def collector(request: pytest.FixtureRequest) -> Iterator[RequestOutputCollector]:
    collector = RequestOutputCollector(request.param)
    yield collector
    collector.check_invariants()


def test_an_output_is_read_once(collector: RequestOutputCollector) -> None:
    output = make_output(delta("a", 1))
    assert collector.is_empty
    collector.put(output)
    assert not collector.is_empty
    assert collector.get_nowait() is output
    assert collector.get_nowait() is None
    assert collector.is_empty


def test_unread_deltas_are_joined() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(make_output(delta("a", 1, logprobs=[logprob(1)])))
    collector.put(make_output(delta("", 2, logprobs=[logprob(2)]), rank=3))
    collector.put(make_output(delta("b", 3, 4, finish_reason="stop", stop_reason="x"), finished=True))
    output = collector.get_nowait()
    assert output == make_output(
        delta("ab", 1, 2, 3, 4, logprobs=[logprob(1), logprob(2)], finish_reason="stop", stop_reason="x"), finished=True, rank=3
    )


def test_unread_cumulative_outputs_are_replaced() -> None:
    collector = RequestOutputCollector(CUMULATIVE)
    collector.put(make_output(delta("a", 1)))
    collector.put(make_output(delta("ab", 1, 2)))
    assert collector.get_nowait() == make_output(delta("ab", 1, 2))


@pytest.mark.parametrize(("kind", "first"), [(DELTA, delta("ac", 1, 3)), (CUMULATIVE, delta("c", 3))])
def test_sequences_are_kept_apart_and_in_order(kind: RequestOutputKind, first: CompletionOutput) -> None:
    collector = RequestOutputCollector(kind)
    collector.put(make_output(delta("b", 2, index=1, finish_reason="stop")))
    collector.put(make_output(delta("a", 1)))
    collector.put(make_output(delta("c", 3)))
    assert collector.get_nowait() == make_output(first, delta("b", 2, index=1, finish_reason="stop"))


def test_an_error_is_raised_after_the_unread_tokens_and_again(collector: RequestOutputCollector) -> None:
    output = make_output(delta("a", 1))
    collector.put(output)
    collector.put_error(EngineGenerateError("broken"))
    assert collector.get_nowait() is output
    for _ in range(2):
        with pytest.raises(EngineGenerateError, match="broken"):
            collector.get_nowait()


def test_the_first_of_two_errors_counts(collector: RequestOutputCollector) -> None:
    collector.put_error(EngineGenerateError("first"))
    collector.put_error(EngineGenerateError("second"))
    with pytest.raises(EngineGenerateError, match="first"):
        collector.get_nowait()


def test_reading_past_the_end_fails_instead_of_waiting_for_ever(collector: RequestOutputCollector) -> None:
    collector.put(make_output(delta("a", 1, finish_reason="length"), finished=True))
    collector.get_nowait()
    with pytest.raises(RuntimeError, match="has ended"):
        collector.get_nowait()


async def test_a_waiting_reader_wakes_for_an_output(collector: RequestOutputCollector) -> None:
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    assert not reader.done()
    collector.put(make_output(delta("a", 1)))
    assert await asyncio.wait_for(reader, TIMEOUT_S) == make_output(delta("a", 1))


async def test_a_waiting_reader_wakes_for_an_error(collector: RequestOutputCollector) -> None:
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put_error(EngineGenerateError("broken"))
    with pytest.raises(EngineGenerateError, match="broken"):
        await asyncio.wait_for(reader, TIMEOUT_S)


async def test_outputs_put_before_a_woken_reader_runs_are_in_its_one_read() -> None:
    collector = RequestOutputCollector(DELTA)
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(make_output(delta("a", 1)))
    collector.put(make_output(delta("b", 2)))
    assert (await asyncio.wait_for(reader, TIMEOUT_S)).outputs[0].text == "ab"


async def test_a_cancelled_read_loses_nothing(collector: RequestOutputCollector) -> None:
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(make_output(delta("a", 1)))
    reader.cancel()  # between the wake-up and the read
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.wait_for(collector.get(), TIMEOUT_S) == make_output(delta("a", 1))


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.text("ab", max_size=3))), max_size=20))
def test_whatever_the_reads_deltas_joined_are_the_whole(steps: list[tuple[int, str] | None]) -> None:
    """None is a read."""
    collector = RequestOutputCollector(DELTA)
    sent, read = ["", "", ""], ["", "", ""]
    for step in [*steps, None]:
        if step is not None:
            index, text = step
            sent[index] += text
            collector.put(make_output(delta(text, index=index)))
        elif (output := collector.get_nowait()) is not None:
            for completion in output.outputs:
                read[completion.index] += completion.text
        collector.check_invariants()
    assert read == sent


def test_reader_that_stops_for_20000_tokens_costs_less_than_256_kb() -> None:
    collector = RequestOutputCollector(DELTA)
    tracemalloc.start()
    for i in range(20_000):
        collector.put(make_output(delta(f" {i:05}", 100_000 + i)))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    collector.check_invariants()
    assert num_bytes < 256_000
    output = collector.get_nowait()
    assert output == make_output(delta("".join(f" {i:05}" for i in range(20_000)), *range(100_000, 120_000)))


@pytest.mark.parametrize("read_after", [1, NUM_PLAIN_TOKENS - 1, NUM_PLAIN_TOKENS, NUM_PLAIN_TOKENS + 1, 999])
def test_long_backlogs_of_several_sequences_lose_nothing_and_stay_apart(read_after: int) -> None:
    collector, num_tokens = RequestOutputCollector(DELTA), 1000
    text, ids, logprobs = {0: "", 1: ""}, {0: [], 1: []}, {0: [], 1: []}  # type: ignore[var-annotated]

    def read() -> None:
        output = collector.get_nowait()
        collector.check_invariants()
        for completion in output.outputs if output else ():
            text[completion.index] += completion.text
            ids[completion.index] += completion.token_ids
            logprobs[completion.index] += completion.logprobs or []

    for i in range(num_tokens):
        for index in (0, 1):
            collector.put(make_output(delta("é"[index:] + str(i), i, index=index, logprobs=[logprob(i)])))
        if i == read_after:
            read()
    read()
    for index in (0, 1):
        assert text[index] == "".join("é"[index:] + str(i) for i in range(num_tokens))
        assert ids[index] == list(range(num_tokens))
        assert [position.chosen.token_id for position in logprobs[index]] == ids[index]

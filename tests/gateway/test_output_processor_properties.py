"""Any order of anything: each request has exactly one end, and no token is lost or doubled."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cores.messages import Finished, FinishReason
from gateway.errors import EngineDeadError
from gateway.output_processor import OutputProcessor
from tests.gateway.output_harness import (
    CUMULATIVE,
    DELTA,
    EOS,
    FINAL_ONLY,
    TOKENIZER,
    RecordingSink,
    add_request,
    outputs,
    tokens,
)

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

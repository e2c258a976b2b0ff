"""Children of one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cores.sampling_params import MAX_N, MAX_SEED, SamplingParams
from gateway.outputs import CompletionOutput
from gateway.parallel_sampling import ParentRequest, child_seed


@given(st.integers(-(2**63), MAX_SEED))
def test_child_seeds_are_distinct_in_range_and_begin_with_the_parents(seed: int) -> None:
    seeds = [child_seed(seed, index) for index in range(MAX_N)]
    assert seeds[0] == seed
    assert len(set(seeds)) == MAX_N
    assert all(-(2**63) <= s <= MAX_SEED for s in seeds)


def test_children_ask_for_one_sequence_each_and_keep_the_rest() -> None:
    parent = ParentRequest("request", SamplingParams(n=3, seed=5, temperature=0.5, stop=("x",)))
    children = [parent.child_params(index) for index in range(3)]
    assert {child.n for child in children} == {1}
    assert {(child.temperature, child.stop) for child in children} == {(0.5, ("x",))}
    assert parent.child_params(1) == children[1]


def test_all_ends_come_together_by_index_with_the_last_child() -> None:
    parent = ParentRequest("request", SamplingParams(n=3, seed=5))
    ends = [CompletionOutput(index, "", [], finish_reason="stop") for index in range(3)]
    assert parent.record(ends[2]) is None
    assert parent.record(ends[0]) is None
    assert parent.record(ends[1]) == ends

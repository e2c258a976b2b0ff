"""The baselines do what the others are said to do, and the oracle's estimate is what then happens."""

from __future__ import annotations

import random

import pytest

from balancer.simulation.baselines import SglangCacheAware, SnapshotLedger
from balancer.simulation.front_end import SimulatedRoutingRequest
from balancer.simulation.oracle import expected_ttft_s
from balancer.simulation.rank import SimulatedRank
from balancer.simulation.request import SimulatedRequest, make_block_hashes
from balancer.simulation.trace import TraceRequest
from balancer.testing import make_view
from cores.messages import RankId, RankLoad
from tests.balancer.simulation.workload import make_config


def make_simulated(handle: int, num_prompt_tokens: int, *hash_ids: int, num_output_tokens: int = 10) -> SimulatedRequest:
    trace = TraceRequest(0.0, num_prompt_tokens, num_output_tokens, hash_ids)
    return SimulatedRequest(handle, 0, trace, make_block_hashes(trace, handle, 512, 512), num_prompt_tokens // 512)


def routing(request: SimulatedRequest) -> SimulatedRoutingRequest:
    return SimulatedRoutingRequest(num_prompt_tokens=request.num_prompt_tokens, request=request)


def test_a_snapshot_erases_what_was_counted_since_the_last() -> None:
    ledger, rank_id = SnapshotLedger(bump=2), RankId(0, 1)
    ledger.add_rank(rank_id, max_num_batched_tokens=8192, max_num_seqs=256)
    ledger.book(1, rank_id, 100)
    ledger.on_sent(1, 1)
    assert ledger.view(rank_id).num_waiting == 2
    ledger.on_report(rank_id, 1, 0, RankLoad(num_running=3), 0.1)
    view = ledger.view(rank_id)
    assert (view.num_waiting, view.num_running, view.own_in_flight) == (0, 3, 1)


def test_sglang_follows_a_long_match_and_else_the_smallest_record() -> None:
    policy = SglangCacheAware(random.Random(0))
    views = [make_view(0), make_view(1)]
    first = policy.choose(routing(make_simulated(0, 2048, 1, 2, 3, 4)), views, 0.0)
    again = policy.choose(routing(make_simulated(1, 2048, 1, 2, 3, 9)), views, 0.0)
    other = policy.choose(routing(make_simulated(2, 2048, 1, 20, 21, 22)), views, 0.0)
    assert (again.rank_id, again.reason) == (first.rank_id, "match")
    assert (other.rank_id != first.rank_id, other.reason) == (True, "smallest_record")


def test_sglang_takes_the_shortest_queue_once_counts_are_far_apart() -> None:
    policy = SglangCacheAware(random.Random(0))
    request = routing(make_simulated(0, 1024, 1, 2))
    first = policy.choose(request, [make_view(0), make_view(1)], 0.0)
    views = [make_view(rank, own_in_flight=100 if rank == first.rank_id.rank else 30) for rank in (0, 1)]
    choice = policy.choose(request, views, 0.0)
    assert (choice.rank_id != first.rank_id, choice.reason) == (True, "shortest_queue")


def test_sglang_record_forgets_the_oldest() -> None:
    policy = SglangCacheAware(random.Random(0))
    policy.max_blocks = 3
    views = [make_view(0)]
    policy.choose(routing(make_simulated(0, 1024, 1, 2)), views, 0.0)
    policy.choose(routing(make_simulated(1, 1024, 3, 4)), views, 0.0)
    (record,) = policy._records.values()
    assert len(record) == 3
    assert make_simulated(0, 1024, 1, 2).prompt_hashes[0] in record  # prefixes are kept longer than what follows them


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_the_oracle_expects_what_happens(num_before: int) -> None:
    rank = SimulatedRank(RankId(0, 1), make_config().rank, num_front_ends=1)
    for handle in range(num_before):
        rank.submit(0.0, handle + 1, make_simulated(handle, 6000, *range(100 * handle, 100 * handle + 12)))
    rank.advance(0.1)
    request = make_simulated(99, 3000, 1, 2, 7, 8, 9, 10)
    expected_s = 0.1 + expected_ttft_s(rank, request, 0.1)
    rank.submit(0.1, 100, request)
    rank.advance(100.0)
    assert request.first_token_s == pytest.approx(expected_s, rel=0.1)


def test_the_oracle_sees_that_blocks_are_short() -> None:
    rank = SimulatedRank(RankId(0, 1), make_config(num_kv_blocks=16).rank, num_front_ends=1)
    rank.submit(0.0, 1, make_simulated(0, 6000, num_output_tokens=300))
    rank.advance(1.0)
    request = make_simulated(1, 4000)
    expected_s = 1.0 + expected_ttft_s(rank, request, 1.0)
    rank.submit(1.0, 2, request)
    rank.advance(100.0)
    assert request.first_token_s is not None
    assert request.first_token_s > 2.0
    assert request.first_token_s == pytest.approx(expected_s, rel=0.1)

"""One rank keeps the engine's times: computed here by hand, from the cost model's formula."""

from __future__ import annotations

import pytest

from balancer.simulation.rank import NEVER, RankConfig, SimulatedRank
from balancer.simulation.request import SimulatedRequest, make_block_hashes
from balancer.simulation.trace import TraceRequest
from cores.config import SimulatedConfig
from cores.messages import RankId

COST = SimulatedConfig(step_ms=10, prefill_us=100, seq_us=1000, ctx_ns=0)


def make_rank(
    *, cost: SimulatedConfig = COST, num_kv_blocks: int = 100, fast_forward: bool = True, budget: int = 1000
) -> SimulatedRank:
    config = RankConfig(
        cost=cost, num_kv_blocks=num_kv_blocks, block_size=16, max_num_batched_tokens=budget, fast_forward=fast_forward
    )
    return SimulatedRank(RankId(0, 1), config, num_front_ends=1)


def make_simulated(
    handle: int, num_prompt_tokens: int, num_output_tokens: int, hash_ids: tuple[int, ...] = ()
) -> SimulatedRequest:
    trace = TraceRequest(0.0, num_prompt_tokens, num_output_tokens, hash_ids)
    return SimulatedRequest(handle, 0, trace, make_block_hashes(trace, handle, 16, 16), num_prompt_tokens // 16)


def test_an_idle_rank_begins_at_once_and_decodes_to_the_end() -> None:
    rank, request = make_rank(), make_simulated(0, 50, 3)
    rank.submit(1.0, 1, request)
    rank.advance(100.0)
    assert request.first_token_s == pytest.approx(1.0 + 0.010 + 0.005 + 0.001)
    assert request.last_token_s == pytest.approx(1.016 + 2 * 0.011)
    assert request.num_ends == 1
    assert rank.next_end_s == NEVER
    rank.check_invariants()


def test_the_context_costs_what_is_attended_to() -> None:
    rank, request = make_rank(cost=SimulatedConfig(step_ms=0, prefill_us=0, seq_us=0, ctx_ns=1e6)), make_simulated(0, 10, 3)
    rank.submit(0.0, 1, request)
    rank.advance(1.0)
    assert request.first_token_s == pytest.approx(0.010)
    assert request.last_token_s == pytest.approx(0.010 + 0.011 + 0.012)


def test_a_long_prompt_takes_several_steps_and_one_that_comes_meanwhile_shares_the_last() -> None:
    rank, long, late = make_rank(num_kv_blocks=200), make_simulated(0, 1500, 1), make_simulated(1, 100, 1)
    rank.submit(0.0, 1, long)
    rank.advance(0.05)
    rank.submit(0.05, 2, late)
    rank.advance(10.0)
    first_s = 0.010 + 0.100 + 0.001
    assert long.first_token_s == late.first_token_s == pytest.approx(first_s + 0.010 + 0.060 + 0.002)


def test_a_command_in_the_middle_of_a_stretch_takes_effect_with_the_next_step() -> None:
    rank, first, second = make_rank(), make_simulated(0, 20, 200), make_simulated(1, 30, 1)
    rank.submit(0.0, 1, first)
    rank.advance(0.5)
    now, step_end_s = 0.5, rank.next_end_s
    rank.submit(now, 2, second)
    rank.advance(10.0)
    assert second.first_token_s == pytest.approx(step_end_s + 0.010 + 0.003 + 0.002)


def test_a_cached_prefix_is_not_computed_again() -> None:
    rank, first, second = make_rank(), make_simulated(0, 80, 1, (1, 2, 3, 4, 5)), make_simulated(1, 80, 1, (1, 2, 3, 9, 10))
    rank.submit(0.0, 1, first)
    rank.advance(1.0)
    rank.submit(1.0, 2, second)
    rank.advance(2.0)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert second.first_token_s == pytest.approx(1.0 + 0.010 + 0.0032 + 0.001)


def test_outputs_are_shared_with_no_one() -> None:
    rank, first, second = make_rank(), make_simulated(0, 16, 40, (1,)), make_simulated(1, 48, 1, (1, 2, 3))
    rank.submit(0.0, 1, first)
    rank.advance(5.0)
    rank.submit(5.0, 2, second)
    rank.advance(6.0)
    assert second.num_cached_tokens == 16


def test_each_step_is_reported_with_what_it_contains() -> None:
    rank, request = make_rank(), make_simulated(7, 50, 4)
    rank.submit(0.0, 5, request)
    rank.advance(10.0)
    reports = list(rank.outboxes[0])
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert [report.command_seqs for report in reports] == [(5,)] * 4
    assert [list(report.first_tokens) for report in reports] == [[(0, 7)], [], [], []]
    assert [list(report.finished) for report in reports] == [[], [], [], [(0, 7)]]
    assert [report.load.num_running for report in reports] == [1, 1, 1, 0]


def test_a_preempted_request_waits_and_its_gap_is_noted() -> None:
    rank = make_rank(num_kv_blocks=6)
    requests = [make_simulated(handle, 30, 33) for handle in (0, 1)]  # four blocks each in the end
    for seq, request in enumerate(requests, 1):
        rank.submit(0.0, seq, request)
    rank.advance(10.0)
    assert [request.num_ends for request in requests] == [1, 1]
    assert rank.scheduler.stats().num_preemptions > 0
    (stall_s,) = requests[1].stalls_s
    assert requests[0].stalls_s == []
    assert stall_s > 0.1
    rank.check_invariants()


def test_a_request_that_never_fits_ends_with_the_reason() -> None:
    rank, request = make_rank(num_kv_blocks=2), make_simulated(0, 50, 3)
    rank.submit(0.0, 1, request)
    assert request.num_ends == 1
    assert "the model takes 32 in all" in (request.error or "")
    assert list(rank.outboxes[0][-1].finished) == [(0, 0)]


def test_death_loses_the_step_under_way_and_nothing_before() -> None:
    rank, request = make_rank(), make_simulated(0, 50, 100)
    rank.submit(0.0, 1, request)
    rank.advance(0.016 + 5.5 * 0.011)
    rank.die()
    assert request.num_output_tokens == 6
    assert request.last_token_s == pytest.approx(0.016 + 5 * 0.011)
    assert request.num_ends == 0
    rank.advance(100.0)
    assert request.num_ends == 0


def test_a_dead_rank_takes_requests_and_does_nothing() -> None:
    rank, request = make_rank(), make_simulated(0, 50, 1)
    rank.die()
    rank.submit(0.0, 1, request)
    rank.advance(100.0)
    assert request.first_token_s is None


def test_slowing_down_begins_with_the_next_step() -> None:
    rank, request = make_rank(), make_simulated(0, 50, 5)
    rank.submit(0.0, 1, request)
    rank.advance(0.020)
    rank.slow_down(3.0)
    rank.advance(10.0)
    assert request.last_token_s == pytest.approx(0.016 + 0.011 + 3 * 0.033)


def test_an_aborted_request_leaves_its_place_with_the_next_step() -> None:
    rank, request = make_rank(), make_simulated(0, 50, 500)
    rank.submit(0.0, 1, request)
    rank.advance(0.1)
    rank.submit(0.1, 2, request, is_abort=True)
    rank.advance(10.0)
    assert not rank.has_work
    assert rank.outboxes[0][-1].load.num_running == 1  # of the last step that it was in

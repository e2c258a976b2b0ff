from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from balancer.load import SEQUENCE_TOKENS, RankView
from balancer.policies.least_tokens import (
    MAX_REPORT_AGE_S,
    MAX_SLOWNESS,
    RATE_NOISE,
    LeastTokens,
)
from balancer.policy import Choice
from balancer.testing import make_request, make_view
from cores.messages import RankId


def choose(*ranks: RankView, num_prompt_tokens: int = 100, seed: int = 7) -> Choice:
    return LeastTokens(random.Random(seed)).choose(make_request(num_prompt_tokens), ranks, now=0.0)


def prefers(better: dict[str, Any], worse: dict[str, Any], **request: int) -> bool:
    """Whatever the order of the ranks, and wherever the rotation starts."""
    picks = {choose(make_view(0, **better), make_view(1, **worse), seed=seed, **request).rank_id.rank for seed in range(4)}
    picks |= {1 - choose(make_view(0, **worse), make_view(1, **better), seed=seed, **request).rank_id.rank for seed in range(4)}
    return picks == {0}


def test_fewer_queued_tokens_win_over_fewer_requests() -> None:
    assert prefers({"num_waiting": 10, "num_prefill_tokens": 1_000}, {"num_waiting": 1, "num_prefill_tokens": 32_768})


def test_one_long_prompt_repels_many_short_ones() -> None:
    policy = LeastTokens(random.Random(7))
    num_short = 0
    while True:  # each short one stays
        ranks = [
            make_view(0, num_waiting=1, num_prefill_tokens=32_768),
            make_view(1, num_waiting=num_short, num_prefill_tokens=100 * num_short),
        ]
        if policy.choose(make_request(100), ranks, 0.0).rank_id.rank == 0:
            break
        num_short += 1
    assert num_short == 32_768 // (100 + SEQUENCE_TOKENS) + 1


def test_with_nothing_queued_the_fewer_decodes_win() -> None:
    assert prefers({"num_running": 3, "num_decodes": 3}, {"num_running": 4, "num_decodes": 4})


def test_many_decodes_count_as_much_as_a_medium_prompt() -> None:
    assert prefers({"num_running": 1, "num_prefill_tokens": 2_000}, {"num_running": 100, "num_decodes": 100})
    assert prefers({"num_running": 100, "num_decodes": 100}, {"num_running": 1, "num_prefill_tokens": 8_000})


def test_nearly_full_cache_repels_and_a_half_full_one_does_not() -> None:
    assert prefers({"kv_cache_usage": 0.5, "num_running": 10}, {"kv_cache_usage": 0.97, "num_running": 5})
    assert prefers({"kv_cache_usage": 0.7, "num_running": 5}, {"kv_cache_usage": 0.1, "num_running": 6})


def test_full_cache_costs_one_full_step() -> None:
    assert make_view(kv_cache_usage=1.0).in_tokens() == make_view().in_tokens() + 8192


def test_straggler_is_avoided_while_others_are_idle() -> None:
    assert prefers({"prefill_tokens_per_s": 20_000.0}, {"prefill_tokens_per_s": 1_000.0})


def test_rates_within_noise_do_not_break_ties() -> None:
    ranks = [make_view(0, prefill_tokens_per_s=20_000.0), make_view(1, prefill_tokens_per_s=20_000.0 / RATE_NOISE)]
    policy = LeastTokens(random.Random(7))
    assert Counter(policy.choose(make_request(), ranks, 0.0).rank_id.rank for _ in range(10)) == {0: 5, 1: 5}


def test_rank_three_times_as_slow_gets_a_third() -> None:
    policy, queued = LeastTokens(random.Random(7)), [0, 0, 0]
    for _ in range(700):
        rates = [9_000.0, 9_000.0, 3_000.0]
        ranks = [make_view(rank, num_prefill_tokens=queued[rank], prefill_tokens_per_s=rates[rank]) for rank in range(3)]
        queued[policy.choose(make_request(100), ranks, 0.0).rank_id.rank] += 100
    assert queued[2] == pytest.approx(10_000, rel=0.05)
    assert queued[0] == pytest.approx(queued[1], rel=0.05)


def test_rate_out_of_all_proportion_does_not_shut_a_rank_out() -> None:
    """Whatever it measured, it gets work once the others' queues are ten times its own."""
    assert prefers(
        {"prefill_tokens_per_s": 5.0},
        {"prefill_tokens_per_s": 27_000.0, "num_prefill_tokens": 10_000 * int(MAX_SLOWNESS)},
        num_prompt_tokens=2_000,
    )


def test_rank_without_a_measured_rate_is_taken_for_a_good_one() -> None:
    assert prefers({"prefill_tokens_per_s": 0.0}, {"prefill_tokens_per_s": 9e3, "num_waiting": 1, "num_prefill_tokens": 50})


def test_old_report_of_the_winner_widens_the_choice_to_our_own_counts() -> None:
    """Looks idle in a report that everyone has: half of the front ends would go there. Our own requests are known exactly."""
    stale = make_view(0, reported_at=-MAX_REPORT_AGE_S - 0.1, own_in_flight=9)
    fresh = make_view(1, num_waiting=4, num_prefill_tokens=5_000, own_in_flight=2)
    assert choose(stale, fresh) == Choice(RankId(1, 1), "old_report")


def test_old_reports_spread_over_all_ranks() -> None:
    ranks = [make_view(rank, reported_at=-10.0, num_waiting=rank, own_in_flight=0) for rank in range(8)]
    policy = LeastTokens(random.Random(7))
    counts = Counter(policy.choose(make_request(), ranks, 0.0).rank_id.rank for _ in range(800))
    assert min(counts[rank] for rank in range(8)) > 60


def test_old_report_of_a_busy_rank_does_not_disturb_the_others() -> None:
    ranks = [make_view(0), make_view(1, reported_at=-10.0, num_waiting=9, num_prefill_tokens=9_000)]
    assert choose(*ranks) == Choice(RankId(0, 1), "least_tokens")

from __future__ import annotations

import random

import pytest

from balancer.load import RankView
from balancer.policies import make_policy
from balancer.policies.vllm import Vllm
from balancer.testing import make_request, make_view


def choose(*ranks: RankView, num_front_ends: int = 1) -> int:
    return Vllm(random.Random(7), num_front_ends).choose(make_request(), ranks, 0.0).rank_id.rank


def test_fewest_requests_win_while_the_caches_are_half_empty() -> None:
    assert choose(make_view(0, num_waiting=3, kv_cache_usage=0.5), make_view(1, num_waiting=2, num_running=2)) == 0


@pytest.mark.parametrize(("waiting_at_full_cache", "winner"), [(2, 0), (3, 1)])
def test_waiting_request_counts_four_times_at_a_full_cache(waiting_at_full_cache: int, winner: int) -> None:
    full = make_view(0, num_waiting=waiting_at_full_cache, kv_cache_usage=1.0)
    assert choose(full, make_view(1, num_running=10)) == winner


def test_own_requests_times_front_ends_are_the_floor() -> None:
    ranks = (make_view(0, num_running=3, own_in_flight=2), make_view(1, num_running=5, own_in_flight=1))
    assert choose(*ranks) == 0
    assert choose(*ranks, num_front_ends=4) == 1  # 8 against 5
    assert make_policy("vllm", random.Random(7), num_front_ends=4).choose(make_request(), ranks, 0.0).rank_id.rank == 1

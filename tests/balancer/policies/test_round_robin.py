from __future__ import annotations

import random

from balancer.policies.round_robin import RoundRobin
from balancer.testing import make_request, make_view


def picks(policy: RoundRobin, ranks: list[int], count: int) -> list[int]:
    views = [make_view(rank) for rank in ranks]
    return [policy.choose(make_request(), views, 0.0).rank_id.rank for _ in range(count)]


def test_goes_round_from_a_random_start() -> None:
    order = picks(RoundRobin(random.Random(7)), [0, 1, 2], 6)
    assert order[:3] == order[3:]
    assert sorted(order[:3]) == [0, 1, 2]


def test_starts_differ_between_front_ends() -> None:
    assert {picks(RoundRobin(random.Random(seed)), [0, 1, 2, 3], 1)[0] for seed in range(40)} == {0, 1, 2, 3}


def test_rank_that_leaves_and_comes_back_shifts_nobodys_turn() -> None:
    policy = RoundRobin(random.Random(7))
    while picks(policy, [0, 1, 2], 1) != [0]:
        pass
    assert picks(policy, [0, 2], 1) == [2]
    assert picks(policy, [0, 1, 2], 3) == [0, 1, 2]

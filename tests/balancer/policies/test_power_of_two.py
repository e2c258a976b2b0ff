from __future__ import annotations

import random
from collections import Counter

from balancer.policies.power_of_two import PowerOfTwo
from balancer.policy import sample_two
from balancer.testing import make_request, make_view


def test_busiest_of_many_is_never_chosen_and_the_idlest_most() -> None:
    ranks = [make_view(rank, num_running=rank) for rank in range(5)]
    policy = PowerOfTwo(random.Random(7))
    counts = Counter(policy.choose(make_request(), ranks, 0.0).rank_id.rank for _ in range(2000))
    assert counts[4] == 0
    assert counts[0] > counts[1] > counts[2] > counts[3] > 0


def test_single_rank_is_chosen_without_a_draw() -> None:
    assert PowerOfTwo(random.Random(7)).choose(make_request(), [make_view(3)], 0.0).rank_id.rank == 3


def test_sample_is_two_different_ranks_and_reaches_every_ordered_pair() -> None:
    rng = random.Random(7)
    pairs = {sample_two(rng, 4) for _ in range(500)}
    assert pairs == {(a, b) for a in range(4) for b in range(4) if a != b}

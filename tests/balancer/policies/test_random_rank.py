from __future__ import annotations

import random
from collections import Counter

from balancer.policies.random_rank import RandomRank
from balancer.testing import make_request, make_view


def test_load_does_not_matter() -> None:
    ranks = [make_view(0, num_waiting=1000, num_prefill_tokens=10**6), make_view(1)]
    policy = RandomRank(random.Random(7))
    counts = Counter(policy.choose(make_request(), ranks, 0.0).rank_id.rank for _ in range(1000))
    assert abs(counts[0] - 500) < 60

from __future__ import annotations

import random

from balancer.policies.least_requests import LeastRequests
from balancer.testing import make_request, make_view


def test_waiting_and_running_count_alike() -> None:
    ranks = [make_view(0, num_waiting=2, num_running=2), make_view(1, num_waiting=3), make_view(2, num_running=4)]
    assert LeastRequests(random.Random(7)).choose(make_request(), ranks, 0.0).rank_id.rank == 1


def test_tokens_do_not_count() -> None:
    ranks = [make_view(0, num_waiting=1, num_prefill_tokens=10**6), make_view(1, num_waiting=2, num_prefill_tokens=2)]
    assert LeastRequests(random.Random(7)).choose(make_request(), ranks, 0.0).rank_id.rank == 0

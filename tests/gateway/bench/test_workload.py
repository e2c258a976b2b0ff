"""Which requests a benchmark sends, and when."""

from __future__ import annotations

import random

from balancer.simulation.trace import TraceRequest
from gateway.bench.workload import (
    PlannedRequest,
    from_trace,
    synthetic,
    with_poisson_arrivals,
    without_arrivals,
)

POOL = list(range(100, 300))


def test_synthetic_prompts_have_the_asked_length_and_differ_from_the_start() -> None:
    planned = synthetic(POOL, 50, 64, 8, random.Random(1))
    assert {len(request.prompt_token_ids) for request in planned} == {64}
    assert {request.num_output_tokens for request in planned} == {8}
    assert len({request.prompt_token_ids[:16] for request in planned}) == 50
    assert {token for request in planned for token in request.prompt_token_ids} <= set(POOL)
    assert planned == synthetic(POOL, 50, 64, 8, random.Random(1))
    assert planned != synthetic(POOL, 50, 64, 8, random.Random(2))


def test_trace_prompts_share_what_their_hash_ids_share() -> None:
    trace = [TraceRequest(0.0, 1100, 5, (0, 1, 2)), TraceRequest(1.5, 1500, 6, (0, 1, 9)), TraceRequest(2.0, 30, 7)]
    first, second, third = from_trace(POOL, trace, random.Random(1))
    assert [len(request.prompt_token_ids) for request in (first, second, third)] == [1100, 1500, 30]
    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024]
    assert first.prompt_token_ids[1024:1100] != second.prompt_token_ids[1024:1100]
    assert [request.at_s for request in (first, second, third)] == [0.0, 1.5, 2.0]
    assert [request.num_output_tokens for request in (first, second, third)] == [5, 6, 7]


def test_poisson_arrivals_have_the_asked_rate_and_only_go_forward() -> None:
    planned = with_poisson_arrivals([PlannedRequest((1,), 1)] * 4000, 20.0, random.Random(3))
    times = [request.at_s for request in planned if request.at_s is not None]
    assert times == sorted(times)
    assert 0.9 < len(times) / times[-1] / 20.0 < 1.1
    assert {request.at_s for request in without_arrivals(planned)} == {None}

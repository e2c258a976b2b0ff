"""A baseline that knows what no front end can: the ranks' true state at this moment, and how long outputs will be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice, Rotation
from balancer.simulation.front_end import SimulatedRoutingRequest
from balancer.simulation.rank import SimulatedRank
from balancer.simulation.request import SimulatedRequest
from cores.messages import RankId


class Oracle:
    """The least time to the first token. Greedy: what a choice costs later requests it does not weigh, so no strict bound."""

    name: ClassVar[str] = "oracle"

    def __init__(self, rng: random.Random, ranks: dict[RankId, SimulatedRank]) -> None:
        self._rotation = Rotation(rng)
        self._ranks = ranks

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        assert isinstance(request, SimulatedRoutingRequest)
        costs = [expected_ttft_s(self._ranks[view.rank_id], request.request, now) for view in ranks]
        return Choice(ranks[self._rotation.pick_least(costs)].rank_id, self.name)


def expected_ttft_s(rank: SimulatedRank, request: SimulatedRequest, now: float) -> float:
    """If it came to that rank now, and nothing after it."""
    if not rank.has_work:
        return rank.slowness * rank.config.cost.step_s(_num_uncached(rank, request), 1, request.num_prompt_tokens)
    scheduler, cost = rank.scheduler, rank.config.cost
    ahead = [*(waiting.runner_state for waiting in scheduler.waiting), *rank.inbox, request]
    queue = [other for other in ahead if isinstance(other, SimulatedRequest)]
    running = list(scheduler.running)
    num_begun = sum(r.num_tokens - r.num_computed_tokens for r in running if not r.is_decoding)
    num_tokens = num_begun - rank.num_prompt_tokens_under_way + sum(_num_uncached(rank, other) for other in queue)
    num_steps = -(-num_tokens // (rank.config.max_num_batched_tokens - scheduler.load().num_decodes))
    step_s = cost.step_s(0, len(running), sum(r.num_tokens for r in running))
    compute_s = num_steps * step_s + (cost.step_s(num_tokens, 0, 0) - cost.step_s(0, 0, 0))
    own_s = cost.step_s(_num_uncached(rank, request), 1, request.num_prompt_tokens)
    wait_s = _num_steps_until_blocks(rank, queue) * step_s + own_s
    return rank.next_end_s - now + rank.slowness * max(compute_s, wait_s)


def _num_uncached(rank: SimulatedRank, request: SimulatedRequest) -> int:
    return request.num_prompt_tokens - rank.scheduler.num_cached_tokens(request)


def _num_steps_until_blocks(rank: SimulatedRank, queue: Sequence[SimulatedRequest]) -> int:
    """Decoding steps until enough running requests have ended for all of the queue to have its KV blocks."""
    scheduler = rank.scheduler
    kv_cache = scheduler.kv_cache
    num_short = sum(kv_cache.num_blocks_for(_num_uncached(rank, request)) for request in queue) - kv_cache.num_blocks_free
    if num_short <= 0:
        return 0
    for request in sorted(scheduler.running, key=lambda request: request.max_total_tokens - request.num_tokens):
        num_short -= len(request.block_ids)
        if num_short <= 0:
            return max(0, request.max_total_tokens - request.num_tokens - rank.num_unbooked_steps)
    return 0

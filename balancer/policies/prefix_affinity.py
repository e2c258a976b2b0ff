"""The rank that will give the first token soonest, what its cache saves included. Right for chats and shared prompts.

Theory of operation
-------------------
As `least_tokens`, but of the request's own tokens only those count which the rank does not have in its cache
(`RoutingRequest.cached_tokens`). These count `COMPUTE_WEIGHT` times: what is computed for this request, others behind it wait
for, too, and a block computed twice takes the place of two. So requests with equal prompts meet where the first of them went,
although computing the prompt once more on an idle rank would be as fast for the second; and a chat stays where its prefix is
until the others' queues are shorter by more than that.

Where no rank has any of it this is `least_tokens`, and old reports widen the choice as they do there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policies.least_tokens import LeastCost, expected_tokens
from balancer.policy import Choice

COMPUTE_WEIGHT = 2.0


class PrefixAffinity:
    name: ClassVar[str] = "prefix_affinity"

    def __init__(self, rng: random.Random) -> None:
        self._choice = LeastCost(rng)

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        best_rate = max([view.prefill_tokens_per_s for view in ranks])
        num_tokens, num_cached = request.num_prompt_tokens, request.cached_tokens.get
        costs = [
            expected_tokens(view, COMPUTE_WEIGHT * (num_tokens - num_cached(view.rank_id, 0)), best_rate) for view in ranks
        ]
        return self._choice.choose(costs, ranks, self.name)

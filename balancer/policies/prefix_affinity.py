"""The rank that will give the first token soonest, what its cache saves included. Right for chats and shared prompts.

Theory of operation
-------------------
As `least_tokens`, but of the request's own tokens only those count which the rank does not have in its cache
(`RoutingRequest.cached_tokens`). These count `COMPUTE_WEIGHT` times: what is computed for this request, others behind it wait
for, too, and a block computed twice takes the place of two. So requests with equal prompts meet where the first of them went,
although computing the prompt once more on an idle rank would be as fast for the second; and a chat stays where its prefix is
until the others' queues are shorter by more than that.

A prefix that many share would gather them all on few ranks: for each of them alone that is quicker, but together they slow down
each other's every token, while other ranks, to which it would have to be brought only once, stand idle. So a rank is crowded,
and its cache counts for nothing, while more of our requests are there than `CROWD_FACTOR` times those on the rank of the least
load, and `CROWD_SLACK`. Chats, each of which has a prefix of its own, hardly come to that. A rank that has just started is the
one of the least load only until it has something to compute; so it gets its share bit by bit, and chats keep their ranks.

Where no rank has any of it this is `least_tokens`, and old reports widen the choice as they do there. Of ranks that cost alike,
a session (`X-Session-Id`) always takes the same one: a chat that is too short to be found in a cache stays together, too.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policies.least_tokens import LeastCost
from balancer.policy import Choice

COMPUTE_WEIGHT = 2
TIE_BREAK = 0.5  # tokens; costs are whole ones, unless a rank is slow
CROWD_FACTOR, CROWD_SLACK = 1.5, 16  # 1.25 and 12 were alike; 8 moved long histories too often


_load_tokens = attrgetter("load_tokens")


class PrefixAffinity:
    name: ClassVar[str] = "prefix_affinity"

    def __init__(self, rng: random.Random, compute_weight: float = COMPUTE_WEIGHT) -> None:
        self._choice = LeastCost(rng)
        self._weight = compute_weight

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        weight, cached = self._weight, request.cached_tokens
        own = weight * request.num_prompt_tokens
        crowd: float | None = None  # looked for only where it may matter: it costs as much as the rest
        costs: list[float] = []
        for view in ranks:  # two thirds of the time of a comprehension, which would have to look up all names outside
            cost = view.load_tokens + own
            if view.rank_id in cached:
                if crowd is None and view.own_in_flight > CROWD_SLACK:
                    crowd = _crowd(ranks)
                if crowd is None or view.own_in_flight <= crowd:
                    cost -= weight * cached[view.rank_id]
            costs.append(cost)
        if not cached and request.session_id is not None:
            costs[zlib.crc32(request.session_id.encode()) % len(costs)] -= TIE_BREAK
        return self._choice.choose(costs, ranks, now, self.name)


def _crowd(ranks: Sequence[RankView]) -> float:
    """How many of our requests may be on a rank that is still chosen for a prefix."""
    return CROWD_FACTOR * min(ranks, key=_load_tokens).own_in_flight + CROWD_SLACK

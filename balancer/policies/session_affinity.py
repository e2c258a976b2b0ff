"""The same rank for the same session (`X-Session-Id`), as long as it is not much busier than the others.

Theory of operation
-------------------
Every session has an order of all ranks of its own, drawn from its name (rendezvous hashing). So every front end knows it, now
and after a restart, without a table and without asking anyone; and a rank that comes or goes moves only its own sessions. A
request goes to the first rank in that order that is not busier than the least busy one by more than `MAX_LEAD` steps' tokens.

A request without a session is one for `least_tokens`.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policies.least_tokens import LeastTokens, at_speed
from balancer.policy import Choice

MAX_LEAD = 1.0  # in full steps of the rank: about what a session's cached history may be worth


class SessionAffinity:
    name: ClassVar[str] = "session_affinity"

    def __init__(self, rng: random.Random) -> None:
        self._least_tokens = LeastTokens(rng)

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        if request.session_id is None:
            return self._least_tokens.choose(request, ranks, now)
        costs = at_speed([view.load_tokens for view in ranks], ranks)
        least = min(costs)
        places = _places(request.session_id, ranks[-1].rank_id.rank + 1)
        first, most = ranks[0], -1
        for view, cost in zip(ranks, costs, strict=True):
            place = places[view.rank_id.rank]
            if place > most and cost <= least + MAX_LEAD * view.max_num_batched_tokens:
                first, most = view, place
        return Choice(first.rank_id, self.name)


def _places(session_id: str, num_ranks: int) -> array[int]:
    """A number for each rank: the more, the earlier is it in the session's order. More ranks add numbers and change none."""
    return array("Q", hashlib.shake_128(session_id.encode()).digest(8 * num_ranks))

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
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policies.least_tokens import LeastTokens, at_speed
from balancer.policy import Choice
from cores.messages import RankId

MAX_LEAD = 1.0  # in full steps of the rank: about what a session's cached history may be worth
_UINT64 = (1 << 64) - 1


class SessionAffinity:
    name: ClassVar[str] = "session_affinity"

    def __init__(self, rng: random.Random) -> None:
        self._least_tokens = LeastTokens(rng)

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        if request.session_id is None:
            return self._least_tokens.choose(request, ranks, now)
        costs = at_speed([view.load_tokens for view in ranks], ranks)
        least = min(costs)
        free = [v.rank_id for v, cost in zip(ranks, costs, strict=True) if cost <= least + MAX_LEAD * v.max_num_batched_tokens]
        return Choice(_first(_number_of(request.session_id), free), self.name)


def _number_of(session_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(session_id.encode(), digest_size=8).digest(), "little")


def _first(session: int, ranks: Sequence[RankId]) -> RankId:
    """In the session's order. A rank's place is splitmix64's mixing of both: a fifth of the price of a hash for every rank."""
    first, most = ranks[0], -1
    for rank_id in ranks:
        x = (session + (rank_id.rank + 1) * 0x9E3779B97F4A7C15) & _UINT64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _UINT64
        x ^= x >> 31
        if x > most:
            first, most = rank_id, x
    return first

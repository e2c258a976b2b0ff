"""Each rank in turn, whatever its load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice
from cores.messages import RankId


class RoundRobin:
    name: ClassVar[str] = "round_robin"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last: RankId | None = None

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        self._last = self._next(ranks)
        return Choice(self._last, self.name)

    def _next(self, ranks: Sequence[RankView]) -> RankId:
        if self._last is None:
            return ranks[self._rng.randrange(len(ranks))].rank_id
        # By id and not by position: a rank that leaves or comes back must not shift everyone's turn.
        last = self._last
        return next((view.rank_id for view in ranks if view.rank_id > last), ranks[0].rank_id)

"""Any rank, each as likely as the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice


class RandomRank:
    name: ClassVar[str] = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        return Choice(self._rng.choice(ranks).rank_id, self.name)

"""The better of two ranks drawn at random, by number of requests: stays good when the numbers are old."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice, sample_two


class PowerOfTwo:
    name: ClassVar[str] = "power_of_two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        first, second = (ranks[index] for index in sample_two(self._rng, len(ranks)))
        better = second if second.num_requests < first.num_requests else first
        return Choice(better.rank_id, self.name)

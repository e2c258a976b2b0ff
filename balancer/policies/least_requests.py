"""The rank with the fewest requests, waiting or running. Right when requests are alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice, Rotation


class LeastRequests:
    name: ClassVar[str] = "least_requests"

    def __init__(self, rng: random.Random) -> None:
        self._rotation = Rotation(rng)

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        index = self._rotation.pick_least([view.num_requests for view in ranks])
        return Choice(ranks[index].rank_id, self.name)

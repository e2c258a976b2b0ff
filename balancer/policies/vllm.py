"""The score of vLLM 0.33's internal load balancer, as the baseline to beat.

It counts requests, floors what is reported by the front end's own share (times the number of front ends, each taken to
have sent as much), and punishes a queue behind a filling cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice, Rotation

_KV_FREE = 0.5  # up to this share of the cache in use, waiting requests cost nothing extra
_KV_WEIGHT = 6.0  # so a waiting request counts four times at a full cache


class Vllm:
    name: ClassVar[str] = "vllm"

    def __init__(self, rng: random.Random, num_front_ends: int = 1) -> None:
        self._rotation = Rotation(rng)
        self._num_front_ends = num_front_ends

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        index = self._rotation.pick_least([self._score(view) for view in ranks])
        return Choice(ranks[index].rank_id, self.name)

    def _score(self, view: RankView) -> float:
        num_requests = max(self._num_front_ends * view.own_in_flight, view.num_requests)
        return num_requests + view.num_waiting * _KV_WEIGHT * max(0.0, view.kv_cache_usage - _KV_FREE)

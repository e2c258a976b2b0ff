"""What a policy is, and the two ways of choosing that policies share. Knows no ledger, socket or clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from balancer.load import RankView, RoutingRequest
from cores.messages import RankId


class Choice(NamedTuple):
    rank_id: RankId
    reason: str  # one of few words, fit for a log line and a metric's label


class Policy(Protocol):
    """Chooses a rank. May remember its own choices (a rotation); must not keep loads: those come fresh with every call."""

    name: ClassVar[str]

    def __init__(self, rng: random.Random) -> None:
        """`rng` also draws where a rotation starts: front ends that all began at the first rank would meet there."""
        ...

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        """`ranks` are the eligible ones: at least one, in rank order. Runs for every request, so: microseconds."""
        ...


class Rotation:
    """Picks the least cost; equal costs take turns.

    The search starts behind the last pick. Starting one further each time instead would favour the first of two equal ranks
    that follow several dearer ones.
    """

    def __init__(self, rng: random.Random) -> None:
        self._start = rng.randrange(1 << 16)

    def pick_least(self, costs: Sequence[float]) -> int:
        """Index of the pick."""
        num_costs = len(costs)
        start = self._start % num_costs
        least = min(costs)
        index = costs.index(least)
        if index < start and least in costs[start:]:  # rare: to ask first is cheaper than an exception for most picks
            index = costs.index(least, start)
        self._start = index + 1
        return index


def sample_two(rng: random.Random, num_ranks: int) -> tuple[int, int]:
    """Two different indexes, each ordered pair as likely as any other; twice the same where there is only one."""
    if num_ranks == 1:
        return 0, 0
    first = rng.randrange(num_ranks)
    second = rng.randrange(num_ranks - 1)
    return first, second + (second >= first)

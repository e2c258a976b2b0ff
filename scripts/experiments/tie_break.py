"""C3.2: what equal counts of requests are decided by: always the first, in turn, or who has the prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.ledger import LoadLedger
from balancer.load import RankView, RoutingRequest
from balancer.load_balancer import LoadBalancer
from balancer.policies import make_policy
from balancer.policy import Choice
from balancer.prefix_index import PrefixIndex
from balancer.simulation.contenders import Contender, Ranks
from scripts.experiments.common import CONVERSATION, Case, make_scenario, parse_options, print_table, run_cases

LOAD = 0.85


class FirstOfEqual:
    name: ClassVar[str] = "first"

    def __init__(self, rng: random.Random) -> None:
        """Draws nothing."""

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        return Choice(min(ranks, key=lambda view: view.num_requests).rank_id, self.name)


class CachedOfEqual(FirstOfEqual):
    name: ClassVar[str] = "cached"

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        cached = request.cached_tokens
        return Choice(min(ranks, key=lambda view: (view.num_requests, -cached.get(view.rank_id, 0))).rank_id, self.name)


def first(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(FirstOfEqual(rng), LoadLedger())


def in_turn(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("least_requests", rng), LoadLedger())


def cached(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(CachedOfEqual(rng), LoadLedger(PrefixIndex()))


def prefix_affinity(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("prefix_affinity", rng), LoadLedger(PrefixIndex()))


WAYS = {
    "least requests, the first of equal ranks": first,
    "least requests, equal ranks in turn": in_turn,
    "least requests, of equal ranks the one with the prefix": cached,
    "prefix_affinity": prefix_affinity,
}


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    print_table(
        run_cases([Case(n, Contender(n, make), scenario.config, trace) for n, make in WAYS.items()], options), head="ties"
    )


if __name__ == "__main__":
    main()

"""C3.2: what equal counts of requests are decided by: always the first, in turn, or who has the prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policies.least_requests import LeastRequests
from balancer.policies.prefix_affinity import PrefixAffinity
from balancer.policy import Choice
from scripts.experiments.common import (
    CONVERSATION,
    Case,
    contender,
    ledger_with_prefixes,
    make_scenario,
    parse_options,
    print_table,
    run_cases,
)

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


CONTENDERS = (
    contender("least requests, the first of equal ranks", FirstOfEqual),
    contender("least requests, equal ranks in turn", LeastRequests),
    contender("least requests, of equal ranks the one with the prefix", CachedOfEqual, ledger_with_prefixes),
    contender("prefix_affinity", PrefixAffinity, ledger_with_prefixes),
)


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    print_table(run_cases([Case(one.name, one, scenario.config, trace) for one in CONTENDERS], options), head="ties")


if __name__ == "__main__":
    main()

"""C3.5: how much more a token that a cache would spare counts than one that waits in a queue."""

from __future__ import annotations

import random
from functools import partial

from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policies.prefix_affinity import PrefixAffinity
from balancer.prefix_index import PrefixIndex
from balancer.simulation.contenders import Contender, Ranks
from scripts.experiments.common import CONVERSATION, USUAL, Case, make_scenario, parse_options, print_table, run_cases, seconds

LOAD = 0.85
WEIGHTS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 16.0)


def make_balancer(weight: float, rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(PrefixAffinity(rng, weight), LoadLedger(PrefixIndex()))


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    cases = [Case(f"{w:g}", Contender(f"{w:g}", partial(make_balancer, w)), scenario.config, trace) for w in WEIGHTS]
    print_table(run_cases(cases, options), [*USUAL, ("mean e2e, s", seconds("e2e_ms", "mean"))], head="COMPUTE_WEIGHT")


if __name__ == "__main__":
    main()

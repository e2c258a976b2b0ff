"""C3.5: how much more a token that a cache would spare counts than one that waits in a queue."""

from __future__ import annotations

from functools import partial

from balancer.policies.prefix_affinity import PrefixAffinity
from scripts.experiments.common import (
    CONVERSATION,
    USUAL,
    Case,
    contender,
    ledger_with_prefixes,
    make_scenario,
    parse_options,
    print_table,
    run_cases,
    seconds,
)

LOAD = 0.85
WEIGHTS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 16.0)


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    weighted = {f"{weight:g}": partial(PrefixAffinity, compute_weight=weight) for weight in WEIGHTS}
    cases = [
        Case(label, contender(label, make_policy, ledger_with_prefixes), scenario.config, trace)
        for label, make_policy in weighted.items()
    ]
    print_table(run_cases(cases, options), [*USUAL, ("mean e2e, s", seconds("e2e_ms", "mean"))], head="COMPUTE_WEIGHT")


if __name__ == "__main__":
    main()

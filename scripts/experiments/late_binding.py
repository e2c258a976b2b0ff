"""When a request is bound to a rank, and in which order: at once, or when a rank has room; first come, or short first."""

from __future__ import annotations

from typing import Any

from balancer.simulation.simulator import Death
from scripts.experiments.common import CONVERSATION, USUAL, case, count, make_scenario, parse_options, print_table, run_cases

POLICY = "prefix_affinity"
WAYS: dict[str, dict[str, Any]] = {
    "early": {"dispatch": "early"},
    "late, by arrival": {"dispatch": "late"},
    "late, short prompts first": {"dispatch": "late", "dispatch_order": "shortest"},
}


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    for load, num_front_ends, dies in ((0.85, 1, False), (0.85, 4, False), (0.85, 1, True), (1.1, 1, False)):
        trace = scenario.at(load)
        deaths = (Death(0, 0.3 * trace[-1].arrival_s),) if dies else ()
        print(f"load {load:.2f}, {num_front_ends} front ends{', a rank dies' if dies else ''}\n")
        cases = [
            case(label, POLICY, scenario.with_config(num_front_ends=num_front_ends, deaths=deaths, **more), trace)
            for label, more in WAYS.items()
        ]
        print_table(run_cases(cases, options), [*USUAL, count("moved")], head="dispatch")


if __name__ == "__main__":
    main()

"""Every policy on both traces at three loads: the table that the default comes from."""

from __future__ import annotations

from balancer.simulation.contenders import contender_names
from scripts.experiments.common import AZURE, CONVERSATION, case, make_scenario, parse_options, print_table, run_cases

LOADS = {CONVERSATION: (0.70, 0.85, 0.95), AZURE: (0.70, 0.85)}


def main() -> None:
    options = parse_options(__doc__)
    for name, loads in LOADS.items():
        if not (options.traces / name).is_file():
            continue
        scenario = make_scenario(options, name)
        for load in loads:
            print(f"{name}, load {load:.2f}: {load * scenario.capacity_per_s:.2f} requests/s\n")
            trace = scenario.at(load)
            policies = options.policies or contender_names()
            print_table(run_cases([case(policy, policy, scenario.config, trace) for policy in policies], options))


if __name__ == "__main__":
    main()

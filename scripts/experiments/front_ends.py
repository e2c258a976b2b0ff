"""C3.3: several front ends, each with a ledger of its own, hear of the others' requests from the ranks' reports alone."""

from __future__ import annotations

from dataclasses import replace

from gateway.config import DEFAULT_POLICY
from scripts.experiments.common import CONVERSATION, case, make_scenario, parse_options, print_table, run_cases

LOAD = 0.85
LOAD_INTERVAL_S = 0.05  # what a front end without requests on a rank hears at the latest


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    reporting = replace(scenario.config.reporting, load_interval_s=LOAD_INTERVAL_S)
    cases = [
        case(f"{policy}, {k} front ends", policy, scenario.with_config(num_front_ends=k, reporting=reporting), trace)
        for policy in options.policies or dict.fromkeys((DEFAULT_POLICY, "least_tokens", "power_of_two", "vllm"))
        for k in (1, 2, 4, 8)
    ]
    print_table(run_cases(cases, options))


if __name__ == "__main__":
    main()

"""One rank slowed three times, and one that dies, at a random moment: the time to the first token from 30 s after it on.

Beside them a healthy group of one rank less under the same arrivals. Requests that were moved count, whenever they came.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial

from balancer.simulation.simulator import Death, SimulationResult, Slowdown
from gateway.config import DEFAULT_POLICY
from scripts.experiments.common import (
    CONVERSATION,
    Case,
    Summary,
    case,
    count,
    make_scenario,
    parse_options,
    print_table,
    run_cases,
    seconds,
    ttft_ms,
)

LOAD, SETTLING_S = 0.70, 30.0
POLICIES = tuple(dict.fromkeys((DEFAULT_POLICY, "prefix_affinity", "least_tokens", "vllm")))


def after(event_s: float, result: SimulationResult) -> Summary:
    counted = [r for r in result.requests if r.arrival_s >= event_s + SETTLING_S or r.num_moves]
    return {"after_ms": ttft_ms(counted)}


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    cases: list[Case] = []
    for policy in options.policies or POLICIES:
        for label in ("8 healthy", "7 healthy", "8, one three times slower", "8, one dies"):
            for seed in range(options.seeds):
                rng = random.Random(seed)
                event_s, rank = rng.uniform(0.2, 0.6) * trace[-1].arrival_s, rng.randrange(8)
                config = scenario.config
                if label == "7 healthy":
                    config = dataclasses.replace(config, num_ranks=7)
                elif label == "8, one dies":
                    config = dataclasses.replace(config, deaths=(Death(rank, event_s),))
                elif label == "8, one three times slower":
                    config = dataclasses.replace(config, slowdowns=(Slowdown(rank, event_s, 3.0),))
                cases.append(case(f"{policy}: {label}", policy, config, trace, measure=partial(after, event_s), seed=seed))
    columns = [
        ("TTFT p50, s", seconds("after_ms", "p50")),
        ("p90", seconds("after_ms", "p90")),
        ("p99", seconds("after_ms", "p99")),
        count("moved"),
        count("failed"),
    ]
    print_table(run_cases(cases, options), columns, head=f"load {LOAD} of eight")


if __name__ == "__main__":
    main()

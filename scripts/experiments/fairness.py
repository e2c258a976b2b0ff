"""C3.6: one API key that sends more than its share, and what the others get of a group that has too much to do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from balancer.simulation.simulator import SimulationResult
from balancer.simulation.trace import TraceRequest
from gateway.config import DEFAULT_POLICY
from scripts.experiments.common import (
    CONVERSATION,
    Summary,
    case,
    make_scenario,
    parse_options,
    print_table,
    run_cases,
    seconds,
    ttft_ms,
)

LOAD, GREEDY_SHARE, NUM_OTHERS = 1.3, 0.7, 4  # so each of the others asks for half of the fifth that it is due
WAYS: dict[str, dict[str, Any]] = {
    "early": {"dispatch": "early"},
    "late, by arrival": {"dispatch": "late"},
    "late, short prompts first": {"dispatch": "late", "dispatch_order": "shortest"},
    "late, fair": {"dispatch": "late", "dispatch_order": "fair"},
}


def with_tenants(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    rng = random.Random(1)

    def draw() -> str:
        return "greedy" if rng.random() < GREEDY_SHARE else f"other {rng.randrange(NUM_OTHERS)}"

    return [replace(request, tenant=draw()) for request in trace]


def by_tenant(result: SimulationResult) -> Summary:
    greedy = [r for r in result.requests if r.trace.tenant == "greedy" and r.error is None]
    others = [r for r in result.requests if r.trace.tenant != "greedy" and r.error is None]
    tokens = sum(r.trace.num_prompt_tokens + r.trace.num_output_tokens for r in (*greedy, *others))
    end_s = max(r.last_token_s or 0.0 for r in (*greedy, *others))
    return {"greedy_ms": ttft_ms(greedy), "others_ms": ttft_ms(others), "tokens_per_s": tokens / end_s}


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = with_tenants(scenario.at(LOAD))
    columns = [
        ("the others' TTFT p50, s", seconds("others_ms", "p50")),
        ("p90", seconds("others_ms", "p90")),
        ("p99", seconds("others_ms", "p99")),
        ("the greedy one's p50, s", seconds("greedy_ms", "p50")),
        ("p99", seconds("greedy_ms", "p99")),
        ("tokens/s of all", lambda summary: f"{summary['tokens_per_s']:,.0f}"),
    ]
    for num_front_ends in (1, 4):
        print(f"{num_front_ends} front ends\n")
        cases = [
            case(label, DEFAULT_POLICY, scenario.with_config(num_front_ends=num_front_ends, **more), trace, measure=by_tenant)
            for label, more in WAYS.items()
        ]
        print_table(run_cases(cases, options), columns, head="dispatch")


if __name__ == "__main__":
    main()

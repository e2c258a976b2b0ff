"""C3.7: a rank dies; its requests end with it, or go on elsewhere from their last token."""

from __future__ import annotations

from balancer.simulation.report import spread
from balancer.simulation.simulator import Death, SimulationResult
from gateway.config import DEFAULT_POLICY
from scripts.experiments.common import (
    CONVERSATION,
    Summary,
    case,
    count,
    make_scenario,
    parse_options,
    print_table,
    run_cases,
    seconds,
)

LOAD = 0.70
RESTART_AFTER_S = 60.0


def lost(result: SimulationResult) -> Summary:
    failed = [request for request in result.requests if request.error is not None]
    stalls_ms = [1e3 * max(request.stalls_s) for request in result.requests if request.num_moves and request.stalls_s]
    return {
        "wasted": sum(request.num_output_tokens + request.trace.num_prompt_tokens for request in failed),
        "stall_ms": spread(stalls_ms) or dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0),
    }


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    deaths = (Death(0, 0.5 * trace[-1].arrival_s, RESTART_AFTER_S),)
    cases = [
        case(label, DEFAULT_POLICY, scenario.with_config(deaths=deaths, failover=failover), trace, measure=lost)
        for label, failover in (("they end", False), ("they go on", True))
    ]
    columns = [
        count("failed"),
        count("moved"),
        ("tokens computed in vain", lambda summary: f"{summary['wasted']:.0f}"),
        ("longest pause of a moved stream, p50, s", seconds("stall_ms", "p50")),
        ("p99", seconds("stall_ms", "p99")),
        ("TTFT p99 of all, s", seconds("ttft_ms", "p99")),
    ]
    print_table(run_cases(cases, options), columns, head="requests of a dead rank")


if __name__ == "__main__":
    main()

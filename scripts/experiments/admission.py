"""C3.8: twice as many requests as the ranks can serve, and what is refused at the door."""

from __future__ import annotations

from typing import Any

from balancer.simulation.simulator import SimulationResult
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

LOAD = 2.0
SLO_TTFT_S = 5.0


def within_limit(result: SimulationResult) -> Summary:
    done = [r for r in result.requests if r.error is None]
    good = [r for r in done if r.ttft_s <= SLO_TTFT_S]
    end_s = max(r.last_token_s or 0.0 for r in done)
    return {"goodput": len(good) / end_s, "done_ttft_ms": ttft_ms(done)}


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    rows: dict[str, dict[str, Any]] = {
        "no limit": {},
        "256 requests in flight": {"max_num_queued_requests": 256},
        "128 requests in flight": {"max_num_queued_requests": 128},
        "400,000 prompt tokens queued": {"max_num_queued_tokens": 400_000},
        "200,000 prompt tokens queued": {"max_num_queued_tokens": 200_000},
    }
    cases = [
        case(label, DEFAULT_POLICY, scenario.with_config(**more), trace, measure=within_limit) for label, more in rows.items()
    ]
    columns = [
        (f"requests/s with TTFT ≤ {SLO_TTFT_S:g} s", lambda summary: f"{summary['goodput']:.2f}"),
        ("refused", lambda summary: f"{summary['failed'] / summary['requests']:.0%}"),
        ("TTFT p50 of the others, s", seconds("done_ttft_ms", "p50")),
        ("p99", seconds("done_ttft_ms", "p99")),
    ]
    print_table(run_cases(cases, options), columns, head="limit")


if __name__ == "__main__":
    main()

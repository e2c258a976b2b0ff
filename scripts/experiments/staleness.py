"""C3.1: what the age of loads does to each way of using them. Loads are published every so often; ends are always known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from balancer.policies.least_requests import LeastRequests
from balancer.policies.least_tokens import LeastTokens
from balancer.policies.power_of_two import PowerOfTwo
from balancer.policies.random_rank import RandomRank
from balancer.policies.vllm import Vllm
from balancer.simulation.baselines import SnapshotLedger
from scripts.experiments.common import CONVERSATION, Case, contender, make_scenario, parse_options, print_table, run_cases

INTERVALS_S = (0.0, 0.1, 0.5, 2.0, 10.0)
LOAD = 0.85


CONTENDERS = (
    contender("random", RandomRank),
    contender("two choices, snapshots", PowerOfTwo, partial(SnapshotLedger, bump=0)),
    contender("least requests, snapshots", LeastRequests, partial(SnapshotLedger, bump=0)),
    contender("own requests as a floor (vLLM 0.33)", Vllm, partial(SnapshotLedger, bump=1)),
    contender("least requests, reconciled by number", LeastRequests),
    contender("least tokens, reconciled by number", LeastTokens),
)


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    cases = []
    for one in CONTENDERS:
        for interval_s in INTERVALS_S:
            reporting = replace(scenario.config.reporting, load_interval_s=interval_s)
            cases.append(Case(f"{one.name}@{interval_s}", one, scenario.with_config(reporting=reporting), trace))
    summaries = run_cases(cases, options)
    rows = [summaries[i : i + len(INTERVALS_S)] for i in range(0, len(summaries), len(INTERVALS_S))]
    for title, key, share in (("Mean TTFT, s", "ttft_ms", "mean"), ("p99 queue delay, s", "queue_delay_ms", "p99")):
        print(f"{title}, by seconds between two loads\n")
        merged = [
            {"policy": row[0]["policy"].partition("@")[0]}
            | {str(s): summary[key][share] for s, summary in zip(INTERVALS_S, row, strict=True)}
            for row in rows
        ]
        columns = [(f"{s:g}", lambda summary, s=s: f"{summary[str(s)] / 1e3:.2f}") for s in INTERVALS_S]
        print_table(merged, columns, head="way")


if __name__ == "__main__":
    main()

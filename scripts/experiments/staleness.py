"""C3.1: what the age of loads does to each way of using them. Loads are published every so often; ends are always known."""

from __future__ import annotations

import random
from dataclasses import replace

from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policies import make_policy
from balancer.policies.vllm import Vllm
from balancer.simulation.baselines import SnapshotLedger
from balancer.simulation.contenders import Contender, Ranks
from scripts.experiments.common import CONVERSATION, Case, make_scenario, parse_options, print_table, run_cases

INTERVALS_S = (0.0, 0.1, 0.5, 2.0, 10.0)
LOAD = 0.85


def random_rank(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("random", rng), LoadLedger())


def two_choices(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("power_of_two", rng), SnapshotLedger(bump=0))


def least_requests(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("least_requests", rng), SnapshotLedger(bump=0))


def own_floor(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(Vllm(rng, num_front_ends), SnapshotLedger(bump=num_front_ends))


def least_requests_reconciled(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("least_requests", rng), LoadLedger())


def least_tokens_reconciled(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy("least_tokens", rng), LoadLedger())


WAYS = {
    "random": random_rank,
    "two choices, snapshots": two_choices,
    "least requests, snapshots": least_requests,
    "own requests as a floor (vLLM 0.33)": own_floor,
    "least requests, reconciled by number": least_requests_reconciled,
    "least tokens, reconciled by number": least_tokens_reconciled,
}


def main() -> None:
    options = parse_options(__doc__)
    scenario = make_scenario(options, CONVERSATION)
    trace = scenario.at(LOAD)
    cases = []
    for label, make_balancer in WAYS.items():
        for interval_s in INTERVALS_S:
            reporting = replace(scenario.config.reporting, load_interval_s=interval_s)
            cases.append(
                Case(f"{label}@{interval_s}", Contender(label, make_balancer), scenario.with_config(reporting=reporting), trace)
            )
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

"""What the experiments share: traces at a load, cases run over several seeds and processes, medians, a Markdown table."""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policy import Policy
from balancer.prefix_index import PrefixIndex
from balancer.simulation.contenders import Contender, Ranks, make_contender
from balancer.simulation.report import Spread, spread, summarise
from balancer.simulation.request import SimulatedRequest
from balancer.simulation.runs import capacity_per_s
from balancer.simulation.simulator import Simulation, SimulationConfig, SimulationResult
from balancer.simulation.trace import TraceRequest, load_trace, scale_to_rate, spread_buckets
from gateway.cli import Parser
from gateway.cli.simulate import add_parser, make_config

Summary = dict[str, Any]
CONVERSATION, AZURE = "conversation_trace.jsonl", "AzureLLMInferenceTrace_conv.csv"


@dataclass(frozen=True, slots=True)
class Options:
    traces: Path
    seeds: int
    jobs: int
    max_requests: int | None
    policies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace and the group that it was meant for, with what the group can do."""

    trace: Sequence[TraceRequest]
    config: SimulationConfig
    capacity_per_s: float

    def at(self, load: float) -> list[TraceRequest]:
        return scale_to_rate(self.trace, load * self.capacity_per_s)

    def with_config(self, **changes: Any) -> SimulationConfig:
        return dataclasses.replace(self.config, **changes)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table. `measure` makes figures of a result beside those of the usual summary."""

    label: str
    contender: Contender
    config: SimulationConfig
    trace: Sequence[TraceRequest]
    measure: Callable[[SimulationResult], Summary] | None = None
    seed: int | None = None  # None: all of them


def parse_options(description: str | None, default_seeds: int = 5, *, needs_traces: bool = True) -> Options:
    parser = argparse.ArgumentParser(description=description)
    if needs_traces:
        parser.add_argument(
            "--traces", type=Path, required=True, metavar="DIR", help=f"holds {CONVERSATION} and {AZURE}, or one"
        )
    parser.add_argument(
        "--seeds", type=int, default=default_seeds, metavar="N", help="medians of so many runs (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--num-requests", type=int, metavar="N", help="only the first of each trace (default: all)")
    parser.add_argument(
        "--policy", nargs="+", default=(), metavar="P", help="only these (default: all that the table is about)"
    )
    args = parser.parse_args(namespace=argparse.Namespace(traces=Path()))
    return Options(args.traces, args.seeds, args.jobs, args.num_requests, tuple(args.policy))


def make_scenario(options: Options, name: str) -> Scenario:
    return scenario_of(spread_buckets(load_trace(options.traces / name, options.max_requests)))


def scenario_of(trace: Sequence[TraceRequest], num_ranks: int = 8) -> Scenario:
    """With what `gateway simulate` takes by default."""
    parser = Parser()
    add_parser(parser.add_subparsers())
    config = make_config(parser.parse_args(["simulate", "--trace", "it", "--ranks", str(num_ranks)]), trace)
    return Scenario(trace, config, capacity_per_s(config, trace))


def contender(
    label: str, make_policy: Callable[[random.Random], Policy], make_ledger: Callable[[], LoadLedger] = LoadLedger
) -> Contender:
    """A policy and the ledger that it looks at, for one front end."""
    return Contender(label, partial(_make_balancer, make_policy, make_ledger))


def _make_balancer(
    make_policy: Callable[[random.Random], Policy],
    make_ledger: Callable[[], LoadLedger],
    rng: random.Random,
    num_front_ends: int,
    ranks: Ranks,
) -> LoadBalancer:
    return LoadBalancer(make_policy(rng), make_ledger())


def ledger_with_prefixes() -> LoadLedger:
    return LoadLedger(PrefixIndex())


def case(label: str, policy: str, config: SimulationConfig, trace: Sequence[TraceRequest], **more: Any) -> Case:
    return Case(label, make_contender(policy), config, trace, **more)


def run_cases(cases: Sequence[Case], options: Options) -> list[Summary]:
    """One summary for each label: every number the median over the seeds."""
    runs = [(one, seed) for one in cases for seed in (range(options.seeds) if one.seed is None else [one.seed])]
    if options.jobs == 1:
        summaries = [_run(one, seed) for one, seed in runs]
    else:
        with ProcessPoolExecutor(options.jobs) as pool:
            summaries = list(pool.map(_run, *zip(*runs, strict=True)))
    return [medians(list(group)) for _, group in groupby(summaries, key=lambda summary: summary["policy"])]


def _run(one: Case, seed: int) -> Summary:
    config = dataclasses.replace(one.config, reporting=one.contender.reporting(one.config.reporting))
    simulation = Simulation(config, one.trace, one.contender.make_balancer, seed)
    result = simulation.run()
    simulation.check_invariants()
    summary = summarise(one.label, result, config.rank, 0.0)
    return summary | (one.measure(result) if one.measure is not None else {})


def medians(summaries: Sequence[Summary]) -> Summary:
    """Key by key, and within what has keys of its own."""
    merged: Summary = {}
    for key, first in summaries[0].items():
        values = [summary[key] for summary in summaries]
        if isinstance(first, dict):
            merged[key] = medians(values)
        else:
            merged[key] = median(values) if isinstance(first, int | float) else first
    return merged


Column = tuple[str, Callable[[Summary], str]]


def seconds(key: str, share: str) -> Callable[[Summary], str]:
    return lambda summary: f"{summary[key][share] / 1e3:.3f}"


def count(key: str) -> Column:
    return key, lambda summary: f"{summary[key]:.0f}"


def ttft_ms(requests: Iterable[SimulatedRequest]) -> Spread:
    """Of those that got a first token; at least one did."""
    spread_ms = spread(1e3 * request.ttft_s for request in requests if request.first_token_s is not None)
    assert spread_ms is not None
    return spread_ms


USUAL: list[Column] = [
    ("mean TTFT, s", seconds("ttft_ms", "mean")),
    ("p50", seconds("ttft_ms", "p50")),
    ("p90", seconds("ttft_ms", "p90")),
    ("p99", seconds("ttft_ms", "p99")),
    ("p99 queue delay, s", seconds("queue_delay_ms", "p99")),
    ("p99 ITL, ms", lambda summary: f"{summary['itl_ms']['p99']:.0f}"),
    ("hit rate", lambda summary: f"{summary['prefix_hit_rate']:.1%}"),
    ("imbalance", lambda summary: f"{summary['imbalance']:.3f}"),
]


def print_table(summaries: Sequence[Summary], columns: Sequence[Column] = USUAL, head: str = "policy") -> None:
    print(f"| {head} | " + " | ".join(name for name, _ in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for summary in summaries:
        print(f"| {summary['policy']} | " + " | ".join(cell(summary) for _, cell in columns) + " |")
    print(flush=True)

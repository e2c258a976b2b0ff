"""What the experiments share: traces at a load, cases run over several seeds and processes, medians, a Markdown table."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from balancer.simulation.contenders import Contender, make_contender
from balancer.simulation.report import summarise
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


def parse_options(description: str | None, default_seeds: int = 5) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help=f"holds {CONVERSATION} and {AZURE}, or one")
    parser.add_argument(
        "--seeds", type=int, default=default_seeds, metavar="N", help="medians of so many runs (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--num-requests", type=int, metavar="N", help="only the first of each trace (default: all)")
    parser.add_argument(
        "--policy", nargs="+", default=(), metavar="P", help="only these (default: all that the table is about)"
    )
    args = parser.parse_args()
    return Options(args.traces, args.seeds, args.jobs, args.num_requests, tuple(args.policy))


def make_scenario(options: Options, name: str, num_ranks: int = 8) -> Scenario:
    """With what `gateway simulate` takes by default."""
    trace = spread_buckets(load_trace(options.traces / name, options.max_requests))
    parser = Parser()
    add_parser(parser.add_subparsers())
    config = make_config(parser.parse_args(["simulate", "--trace", name, "--ranks", str(num_ranks)]), trace)
    return Scenario(trace, config, capacity_per_s(config, trace))


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
    return [_median(list(group)) for _, group in groupby(summaries, key=lambda summary: summary["policy"])]


def _run(one: Case, seed: int) -> Summary:
    config = dataclasses.replace(one.config, reporting=one.contender.reporting(one.config.reporting))
    simulation = Simulation(config, one.trace, one.contender.make_balancer, seed)
    result = simulation.run()
    simulation.check_invariants()
    summary = summarise(one.label, result, config.rank, 0.0)
    return summary | (one.measure(result) if one.measure is not None else {})


def _median(summaries: Sequence[Summary]) -> Summary:
    """Key by key, and within what has keys of its own."""
    merged: Summary = {}
    for key, first in summaries[0].items():
        values = [summary[key] for summary in summaries]
        if isinstance(first, dict):
            merged[key] = _median(values)
        else:
            merged[key] = median(values) if isinstance(first, int | float) else first
    return merged


Column = tuple[str, Callable[[Summary], str]]


def seconds(key: str, share: str) -> Callable[[Summary], str]:
    return lambda summary: f"{summary[key][share] / 1e3:.2f}"


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

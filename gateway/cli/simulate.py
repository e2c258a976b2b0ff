"""`gateway simulate`: load balancing policies on a trace of requests, in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from balancer.simulation.contenders import contender_names, make_contender
from balancer.simulation.front_end import Reporting
from balancer.simulation.rank import RankConfig
from balancer.simulation.report import as_table, summarise
from balancer.simulation.runs import capacity_per_s, run_policy
from balancer.simulation.simulator import Death, RollingRestart, SimulationConfig, Slowdown
from balancer.simulation.trace import TraceError, TraceRequest, load_trace, scale_to_rate, spread_buckets
from cores.config import DEFAULT_BLOCK_SIZE, ConfigError, SimulatedConfig
from gateway.config import DEFAULT_POLICY, BalancerConfig

EXIT_USAGE = 2
DEFAULTS = BalancerConfig()
DEFAULT_COST = "step_ms=8 prefill_us=50 seq_us=50 ctx_ns=30"
DEFAULT_KV_TOKENS = 500_000
TRACE_BLOCK_SIZE = 512  # a trace with prefixes tells no finer blocks apart
DESCRIPTION = (
    "Replays a trace (Mooncake's JSON lines or Azure's CSV) through the balancer and through engines with a cost model, in"
    " virtual time, and says what the clients would have seen under each policy."
)
ENGINE_HELP = (
    "The defaults are those of a larger model on a GPU, not those of `serve --engine simulated`: to compare the two, give both"
    " the same --simulated, --max-num-batched-tokens, --max-num-seqs, --block-size and --num-kv-blocks."
)
FAULT_HELP = "times are seconds of the (rescaled) trace; may be given several times"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate", help="load balancing policies on a trace, in virtual time", description=DESCRIPTION
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines or CSV: docs/balancing.md")
    parser.add_argument("--ranks", type=_whole(1, 1024), required=True, metavar="N", help="engine cores, 1 to 1024")
    parser.add_argument(
        "--policy",
        nargs="+",
        action="extend",
        metavar="P",
        help=f"one or several of {', '.join(contender_names())} (default: that of serve, {DEFAULT_POLICY})",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of everything that is drawn (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object per policy")
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_engine(parser.add_argument_group("engine cores", ENGINE_HELP))
    _add_front_ends(parser.add_argument_group("front ends"))
    _add_faults(parser.add_argument_group("faults", FAULT_HELP))
    parser.set_defaults(run=run)


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--load",
        type=_number(above=0),
        metavar="F",
        help="rescale the arrivals to this share of the group's capacity: the rate at which it finishes the trace when all"
        " of it waits at the start (default: the trace's own times)",
    )
    group.add_argument("--bursts", action="store_true", help="keep stamps that come in buckets (default: spread evenly)")
    group.add_argument("--num-requests", type=_whole(1), metavar="N", help="only the first N of the trace (default: all)")
    group.add_argument("--slo-ttft-ms", type=_number(above=0), metavar="MS", help="time to first token that goodput asks for")
    group.add_argument("--slo-itl-ms", type=_number(above=0), metavar="MS", help="mean time per later token, likewise")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--simulated", nargs="+", default=[], metavar="KEY=VALUE", help=f"cost model (default: {DEFAULT_COST})")
    group.add_argument("--max-num-batched-tokens", type=_whole(1), default=8192, metavar="N", help="per step (default: 8192)")
    group.add_argument("--max-num-seqs", type=_whole(1), default=256, metavar="N", help="per step (default: 256)")
    group.add_argument(
        "--block-size",
        type=_whole(1),
        metavar="N",
        help=f"tokens per KV block (default: {TRACE_BLOCK_SIZE} for a trace with hash_ids, else {DEFAULT_BLOCK_SIZE})",
    )
    group.add_argument(
        "--num-kv-blocks", type=_whole(1), metavar="N", help=f"per rank (default: what {DEFAULT_KV_TOKENS:,} tokens fill)"
    )
    group.add_argument("--no-enable-prefix-caching", action="store_true", help="compute every prompt in full")
    group.add_argument("--no-fast-forward", action="store_true", help="compute every step by itself: slower, the same result")


def _add_front_ends(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--front-ends", type=_whole(1, 64), default=1, metavar="K", help="requests come to them in turn (default: 1)"
    )
    group.add_argument(
        "--dispatch", choices=("early", "late"), default=DEFAULTS.dispatch, help="as in serve (default: %(default)s)"
    )
    group.add_argument(
        "--dispatch-order",
        choices=("fcfs", "shortest", "fair"),
        default=DEFAULTS.dispatch_order,
        help="as in serve (default: %(default)s)",
    )
    group.add_argument(
        "--report-delay-ms", type=_number(), default=1.0, metavar="MS", help="from a step's end to the front ends (default: 1)"
    )
    group.add_argument(
        "--report-interval-ms", type=_number(), default=0.0, metavar="MS", help="between loads (default: 0, with every step)"
    )


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kill", type=_death, action="append", default=[], metavar="RANK@S[+S]", help="a rank dies (and restarts)"
    )
    group.add_argument(
        "--slow", type=_slowdown, action="append", default=[], metavar="RANK@S:X", help="X times slower from then"
    )
    group.add_argument("--rolling-restart", type=_number(), metavar="S", help="drain and restart every rank in turn, from then")


def run(args: argparse.Namespace) -> int:
    try:
        policies = list(dict.fromkeys(args.policy or [DEFAULT_POLICY]))
        for name in policies:
            make_contender(name)
        trace = load_trace(args.trace, args.num_requests)
        if not args.bursts:
            trace = spread_buckets(trace)
        config = make_config(args, trace)
    except (TraceError, ConfigError, ValueError) as error:
        print(f"gateway simulate: {error}", file=sys.stderr)
        return EXIT_USAGE
    if args.load is not None:
        trace = scale_to_rate(trace, args.load * capacity_per_s(config, trace))
    summaries = []
    for name in policies:
        started_s = time.perf_counter()
        result = run_policy(name, config, trace, args.seed)
        wall_s = time.perf_counter() - started_s
        summaries.append(summarise(name, result, config.rank, wall_s, slo_ttft_ms=args.slo_ttft_ms, slo_itl_ms=args.slo_itl_ms))
    print(json.dumps(summaries, indent=2) if args.json else f"{describe_load(trace, args.ranks)}\n{as_table(summaries)}")
    return 0


def describe_load(trace: Sequence[TraceRequest], num_ranks: int) -> str:
    """The line above the table: what is the same for every policy."""
    span_s = trace[-1].arrival_s
    rate = f" ({len(trace) / span_s:.2f} a second)" if span_s > 0 else ""
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return f"{len(trace):,} requests within {span_s:,.1f} s{rate} for {ranks}; --json has all figures"


def make_config(args: argparse.Namespace, trace: Sequence[TraceRequest]) -> SimulationConfig:
    """Raises `ConfigError`."""
    balancer = BalancerConfig(dispatch=args.dispatch, dispatch_order=args.dispatch_order)
    has_prefixes = any(request.hash_ids for request in trace)
    block_size = args.block_size or (TRACE_BLOCK_SIZE if has_prefixes else DEFAULT_BLOCK_SIZE)
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
    num_kv_blocks = args.num_kv_blocks or DEFAULT_KV_TOKENS // block_size
    if longest > num_kv_blocks * block_size:
        raise ConfigError(f"--num-kv-blocks {num_kv_blocks} of {block_size} tokens do not hold a request of {longest} tokens")
    for fault in (*args.kill, *args.slow):
        if fault.rank >= args.ranks:
            raise ConfigError(f"a fault of rank {fault.rank}: the ranks are 0 to {args.ranks - 1}")
    return SimulationConfig(
        num_ranks=args.ranks,
        rank=RankConfig(
            cost=SimulatedConfig.parse([*DEFAULT_COST.split(), *args.simulated]),
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            enable_prefix_caching=has_prefixes and not args.no_enable_prefix_caching,
            fast_forward=not args.no_fast_forward,
        ),
        num_front_ends=args.front_ends,
        reporting=Reporting(delay_s=args.report_delay_ms / 1e3, load_interval_s=args.report_interval_ms / 1e3),
        dispatch=balancer.dispatch,
        dispatch_order=balancer.dispatch_order,
        deaths=tuple(args.kill),
        slowdowns=tuple(args.slow),
        rolling_restart=None if args.rolling_restart is None else RollingRestart(args.rolling_restart),
    )


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
        return int(text)

    return convert


def _number(above: float | None = None) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf") or (above is not None and number <= above):
            raise argparse.ArgumentTypeError(f"must be a number {'of at least' if above is None else 'above'} 0, got {text!r}")
        return number

    return convert


def _death(text: str) -> Death:
    """`3@120` or `3@120+20`. Raises `argparse.ArgumentTypeError`."""
    rank, _, times = text.partition("@")
    at_s, plus, restart_s = times.partition("+")
    try:
        return Death(int(rank), float(at_s), float(restart_s) if plus else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be RANK@SECONDS or RANK@SECONDS+SECONDS, got {text!r}") from None


def _slowdown(text: str) -> Slowdown:
    """`3@120:2.5`. Raises `argparse.ArgumentTypeError`."""
    rank, _, rest = text.partition("@")
    at_s, _, factor = rest.partition(":")
    try:
        slowdown = Slowdown(int(rank), float(at_s), float(factor))
    except ValueError:
        slowdown = Slowdown(0, 0.0, 0.0)
    if slowdown.factor <= 0:
        raise argparse.ArgumentTypeError(f"must be RANK@SECONDS:FACTOR with a factor above 0, got {text!r}")
    return slowdown

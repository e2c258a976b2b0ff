"""`gateway bench`: puts streaming load on an endpoint and says what it was like."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from balancer.simulation.trace import TraceError, TraceRequest, load_trace, spread_buckets
from gateway.bench.client import BenchClient, EndpointError, RequestResult, run_load
from gateway.bench.summary import summarise
from gateway.bench.workload import (
    PlannedRequest,
    WorkloadError,
    from_trace,
    synthetic,
    with_poisson_arrivals,
    without_arrivals,
)
from gateway.cli.status import DEFAULT_URL, URL_FORMS, base_url
from gateway.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

DEFAULT_NUM_PROMPTS = 100
DESCRIPTION = """Sends streaming requests and measures time to first token, inter-token latency, end-to-end time and throughput.
--rate or --concurrency is required; only a --dataset may come without them, at its own times."""
EPILOG = "exit status: 0 all requests completed, 1 some failed, 2 nothing could be measured, 130 interrupted"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench", help="put load on an endpoint and measure it", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("--url", type=base_url, default=DEFAULT_URL, help=f"endpoint, {URL_FORMS} (default: {DEFAULT_URL})")
    parser.add_argument("--model", metavar="M", help="model name (default: the endpoint's first)")
    parser.add_argument("--api-key", metavar="KEY", help="bearer token (default: GATEWAY_API_KEY)")
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="TRACE.jsonl",
        help="trace with timestamp (ms), input_length, output_length and hash_ids; or Azure's CSV",
    )
    parser.add_argument(
        "--bursts", action="store_true", help="keep a trace's stamps that come in buckets (default: spread evenly)"
    )
    parser.add_argument("--input-len", type=_positive, metavar="I", help="tokens per prompt, without a dataset (default: 128)")
    parser.add_argument("--output-len", type=_positive, metavar="O", help="tokens per answer, without a dataset (default: 128)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=_positive_float, metavar="R", help="requests per second, Poisson arrivals")
    load.add_argument("--concurrency", type=_positive, metavar="C", help="requests at a time, closed loop")
    parser.add_argument(
        "--num-prompts",
        type=_positive,
        metavar="N",
        help=f"requests in all (default: {DEFAULT_NUM_PROMPTS}, or the whole dataset)",
    )
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions; prompts grow by the chat template")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and arrivals (default: 0)")
    parser.add_argument(
        "--timeout",
        type=_positive_float,
        default=300.0,
        metavar="S",
        help="seconds without a byte until a request counts as failed (default: 300)",
    )
    parser.add_argument("--slo-ttft-ms", type=_positive_float, metavar="MS", help="time to first token that goodput asks for")
    parser.add_argument(
        "--slo-itl-ms", type=_positive_float, metavar="MS", help="mean time per later token that goodput asks for"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    results: list[RequestResult] = []
    progress = _Progress(results)
    is_interrupted = False
    try:
        _check(args)
        trace = read_trace(args) if args.dataset is not None else None
        uvloop.run(_measure(args, trace, progress))
    except KeyboardInterrupt:  # what has been measured is still worth a summary
        is_interrupted = True
    except (WorkloadError, TraceError, EndpointError) as error:
        print(f"gateway bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    finally:
        progress.end()
    run = {"url": args.url, "seed": args.seed, "planned": progress.num_planned, "interrupted": is_interrupted}
    summary = run | summarise(results, slo_ttft_ms=args.slo_ttft_ms, slo_itl_ms=args.slo_itl_ms)
    print(json.dumps(summary, indent=2) if args.json else as_text(summary))
    if is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary["errors"] else 0


def _check(args: argparse.Namespace) -> None:
    if args.dataset is not None and (args.input_len or args.output_len):
        raise WorkloadError("--dataset has its own lengths: leave out --input-len and --output-len")
    if args.dataset is None and args.rate is None and args.concurrency is None:
        raise WorkloadError("say how requests come: --rate R or --concurrency C (a --dataset alone keeps its own times)")


def read_trace(args: argparse.Namespace) -> list[TraceRequest]:
    """As the simulator takes it, so that both can be compared."""
    trace = load_trace(args.dataset, args.num_prompts)
    return trace if args.bursts else spread_buckets(trace)


async def _measure(args: argparse.Namespace, trace: list[TraceRequest] | None, progress: _Progress) -> None:
    api_key = args.api_key or os.environ.get("GATEWAY_API_KEY")
    async with BenchClient(args.url, api_key=api_key, chat=args.chat, timeout_s=args.timeout) as client:
        model = await client.find_model(args.model)
        planned = plan(args, trace, await client.token_pool(model))
        progress.num_planned = len(planned)
        await run_load(client, model, planned, progress.add, concurrency=args.concurrency, temperature=args.temperature)


def plan(args: argparse.Namespace, trace: list[TraceRequest] | None, token_pool: list[int]) -> list[PlannedRequest]:
    """The requests that the arguments ask for."""
    rng = random.Random(args.seed)
    if trace is not None:
        planned = from_trace(token_pool, trace, rng)
    else:
        num_prompts = args.num_prompts or DEFAULT_NUM_PROMPTS
        planned = synthetic(token_pool, num_prompts, args.input_len or 128, args.output_len or 128, rng)
    if args.rate is not None:
        return with_poisson_arrivals(planned, args.rate, rng)
    return without_arrivals(planned) if args.concurrency is not None else planned


class _Progress:
    """Collects results, and on a terminal says twice a second how far it is."""

    def __init__(self, results: list[RequestResult]) -> None:
        self._results = results
        self._shown_s = 0.0
        self._is_terminal = sys.stderr.isatty()
        self.num_planned = 0

    def add(self, result: RequestResult) -> None:
        self._results.append(result)
        now = time.monotonic()
        if self._is_terminal and now - self._shown_s > 0.5:
            self._shown_s = now
            errors = sum(result.error is not None for result in self._results)
            print(f"\r{len(self._results)}/{self.num_planned} requests, {errors} errors ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal and self._shown_s:
            print(file=sys.stderr)


def as_text(summary: dict[str, Any]) -> str:
    """A table for people."""
    interrupted = ", interrupted" if summary["interrupted"] else ""
    lines = [
        f"{summary['completed']} of {summary['planned']} requests completed in {summary['duration_s']:.2f} s{interrupted}",
        f"{summary['requests_per_s']:.2f} req/s   {summary['output_tokens_per_s']:.1f} tok/s out"
        f"   {summary['prompt_tokens']} tokens in, {summary['output_tokens']} out",
    ]
    if summary["goodput_requests_per_s"] is not None:
        lines.append(f"{summary['goodput_requests_per_s']:.2f} req/s within the service level")
    lines.append(f"{'ms':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, key in (("time to first token", "ttft_ms"), ("inter-token latency", "itl_ms"), ("end to end", "e2e_ms")):
        spread = summary[key]
        cells = ["–"] * 4 if spread is None else [f"{spread[column]:.2f}" for column in ("mean", "p50", "p90", "p99")]
        lines.append(f"{name:<22}" + "".join(f"{cell:>10}" for cell in cells))
    if summary["requests_by_rank"]:
        lines.append("by rank: " + ", ".join(f"{rank}: {number}" for rank, number in summary["requests_by_rank"].items()))
    lines += [f"{number} × {message}" for message, number in summary["error_messages"].items()]
    return "\n".join(lines)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number

"""The front end alone, over engines that compute nothing: what a streamed token and a request cost, and what readers wait for.

Ours runs over the simulated engine; vLLM's Python and Rust front ends, where `PEERS` says that they are installed, over vLLM's
engine loop and an executor with the same step time. Servers take turns, so that a noisy machine is noisy for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.load import LoadResult, closed_loop, percentile
from scripts.benchmarks.prompts import chat_body
from scripts.benchmarks.report import Row, compare, publish
from scripts.benchmarks.servers import ROOT, Peers, Server, end_in_order_on_sigterm, gateway, model_directory

OURS, VLLM_PYTHON, VLLM_RUST = "gateway", "vLLM's Python front end", "vLLM's Rust front end"
NUM_WORDS = 58  # 89 tokens with SmolLM2's chat template
# Equal for all: one step takes what arrives together.
LIMITS = ("--max-model-len", "2048", "--max-num-seqs", "512", "--max-num-batched-tokens", "8192")


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    step_ms: float
    concurrency: int
    max_tokens: int
    num_rounds: int  # requests per connection and run


LOADS = (
    Load("64 streams, step 8 ms", 8, 64, 128, 6),
    Load("256 streams, step 20 ms", 20, 256, 128, 3),
    Load("one-token answers, 64 clients", 0, 64, 1, 30),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    result: LoadResult
    cpu_s: float  # of the front end
    rss_mib: float


def measure(server: Server, load: Load, rng: random.Random) -> Measurement:
    bodies = [chat_body(rng, NUM_WORDS, load.max_tokens) for _ in range(load.concurrency * load.num_rounds)]
    before_s = server.front_end_cpu_s()
    result = closed_loop(server.port, "/v1/chat/completions", bodies, load.concurrency)
    return Measurement(result, server.front_end_cpu_s() - before_s, server.front_end_rss_mib())


@contextlib.contextmanager
def all_servers(load: Load, model: str, peers: Peers) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        costs = ("--simulated", f"step_ms={load.step_ms}", "prefill_us=0", "seq_us=0")
        servers = [stack.enter_context(gateway(OURS, model, "--engine", "simulated", *LIMITS, *costs))]
        executor = ("--enforce-eager", "--distributed-executor-backend", "simulated_executor.SimulatedExecutor")
        plugin = {"PYTHONPATH": f"{ROOT}/scripts/benchmarks/vllm_plugin:{ROOT}", "STEP_MS": str(load.step_ms)}
        for name, is_there, environment in (
            (VLLM_PYTHON, peers.has_vllm, {}),
            (VLLM_RUST, peers.has_rust_front_end, peers.rust_environment()),
        ):
            if is_there:
                command = peers.vllm(name, model, *executor, *LIMITS, environment={**plugin, **environment})
                servers.append(stack.enter_context(command))
        yield servers


def run(load: Load, model: str, peers: Peers, num_runs: int, rng: random.Random) -> dict[str, list[Measurement]]:
    """By server. One round of each is not counted: connections, caches and allocators warm up."""
    with all_servers(load, model, peers) as servers:
        measurements: dict[str, list[Measurement]] = {server.name: [] for server in servers}
        for server in servers:
            measure(server, load, rng)
        for number in range(num_runs):
            for server in servers:
                done = measure(server, load, rng)
                measurements[server.name].append(done)
                print(f"{load.name}, run {number + 1}: {_line(server.name, done)}", file=sys.stderr, flush=True)
    return measurements


def _line(name: str, done: Measurement) -> str:
    result = done.result
    return (
        f"{name}: {result.tokens_per_s:.0f} tok/s, {result.requests_per_s:.0f} req/s, CPU {done.cpu_s:.2f} s"
        f" = {1e6 * done.cpu_s / result.tokens:.1f} µs/token, {result.tokens / result.chunks:.2f} tokens/event,"
        f" {result.prompt_tokens / result.num_requests:.0f} prompt tokens;"
        f" load client {result.client_cpu_s / result.duration_s:.0%} of a core"
    )


FIGURES = {
    "CPU per streamed token": ("µs", lambda m: 1e6 * m.cpu_s / m.result.tokens),
    "output": ("tok/s", lambda m: m.result.tokens_per_s),
    "time to first token, median": ("ms", lambda m: 1e3 * percentile(m.result.ttft_s, 0.5)),
    "time to first token, p99": ("ms", lambda m: 1e3 * percentile(m.result.ttft_s, 0.99)),
    "between tokens, median": ("ms", lambda m: 1e3 * percentile(m.result.itl_s, 0.5)),
    "between tokens, p99": ("ms", lambda m: 1e3 * percentile(m.result.itl_s, 0.99)),
    "front end's memory": ("MiB", lambda m: m.rss_mib),
}
ONE_TOKEN_FIGURES = {
    "requests": ("req/s", lambda m: m.result.requests_per_s),
    "CPU per request": ("ms", lambda m: 1e3 * m.cpu_s / m.result.num_requests),
}


def rows_of(load: Load, measurements: dict[str, list[Measurement]]) -> list[Row]:
    rows = []
    for figure, (unit, value) in (ONE_TOKEN_FIGURES if load.max_tokens == 1 else FIGURES).items():
        ours = [value(m) for m in measurements[OURS]]
        for peer in (VLLM_PYTHON, VLLM_RUST):
            theirs = [value(m) for m in measurements[peer]] if peer in measurements else None
            rows.append(compare(f"{load.name}: {figure}", unit, ours, peer, theirs))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_frontend", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each server, in turns; medians count (default: 3)")
    parser.add_argument("--only", metavar="TEXT", default="", help="loads whose name contains this")
    args = parser.parse_args()
    end_in_order_on_sigterm()
    model, peers, rng = model_directory(), Peers.from_environment(), random.Random(0)
    rows: list[Row] = []
    for load in LOADS:
        if args.only in load.name:
            rows += rows_of(load, run(load, model, peers, args.runs, rng))
    publish(rows, args.runs, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Four simulated ranks under one heavy-tailed load: behind each proxy with its shipped configuration, and behind our own
balancer.

Prompts and answers have log-normal lengths, as traces of chats and documents have: most are short, and one in a hundred takes
as long to compute as thirty of them. Requests come at random moments. Every set-up gets the same requests at the same times.
What is shown is the time to the first token: all that a balancer can change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from cores.testing import make_tiny_model_dir
from scripts.benchmarks.proxies import find_program, free_ports, running_proxy
from scripts.benchmarks.report import machine
from scripts.benchmarks.servers import running

NUM_RANKS = 4
MAX_MODEL_LEN = 16_384
COST = [
    "step_ms=20",
    "prefill_us=200",
    "seq_us=200",
    "ctx_ns=0",
]  # slow engines: the machine itself must not be what is measured
PROMPT, ANSWER = (300, 1.4, 8_000), (60, 0.8, 400)  # median, sigma, longest
INSIDE = "inside"
# name: program, and what is replaced in its configuration
PROXIES: dict[str, tuple[str, dict[str, str]]] = {
    "nginx": ("nginx", {}),
    "haproxy": ("haproxy", {}),
    "envoy": ("envoy", {}),
    "envoy by load": ("envoy", {"cluster: by_requests": "cluster: by_load"}),
}
PERCENTILES = ("mean", "p50", "p90", "p99")


def write_trace(path: Path, num_requests: int, rate_per_s: float, seed: int) -> None:
    rng, at_ms = random.Random(seed), 0.0
    with path.open("w") as file:
        for _ in range(num_requests):
            at_ms += 1000 * rng.expovariate(rate_per_s)
            row = {"timestamp": at_ms, "input_length": length(rng, *PROMPT), "output_length": length(rng, *ANSWER)}
            file.write(json.dumps(row) + "\n")


def length(rng: random.Random, middle: float, sigma: float, longest: int) -> int:
    return max(1, min(longest, round(middle * rng.lognormvariate(0, sigma))))


def serve_command(model: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "gateway", "serve", str(model), "--engine", "simulated", "--data-parallel-backend", "mp",
        "-dp", str(NUM_RANKS), "--simulated", *COST, *arguments,
    ]  # fmt: skip


@contextlib.contextmanager
def set_up(name: str, model: Path, directory: Path) -> Iterator[str]:
    """The URL of four ranks behind one balancer."""
    if name == INSIDE:
        port = free_ports(1)
        with running(name, serve_command(model, "--port", str(port)), port):
            yield f"http://127.0.0.1:{port}"
        return
    with contextlib.ExitStack() as stack:
        first = free_ports(NUM_RANKS + 3)
        *ports, rpc_port, proxy_port, _ = range(first, first + NUM_RANKS + 3)
        for rank, port in enumerate(ports):
            place = ["--data-parallel-external-lb", "--data-parallel-rank", str(rank), "--port", str(port)]
            command = serve_command(model, *place, "--data-parallel-rpc-port", str(rpc_port))
            stack.enter_context(running(f"endpoint {rank}", command, port))
        program, replacements = PROXIES[name]
        path = find_program(program)
        assert path is not None
        proxy = running_proxy(program, path, ports, directory, proxy_port, replacements)
        yield stack.enter_context(proxy).url


def measure(url: str, trace: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "gateway", "bench", "--url", url, "--dataset", str(trace), "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout))


def rows(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over the runs of each set-up."""
    table = []
    for name, measured in runs.items():
        ttft = {key: round(median(run["ttft_ms"][key] for run in measured)) for key in PERCENTILES}
        by_rank = [sum(counts) for counts in zip(*(run["requests_by_rank"].values() for run in measured), strict=True)]
        table.append(
            {"name": name, "ttft_ms": ttft, "requests_by_rank": by_rank, "errors": sum(run["errors"] for run in measured)}
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each set-up, which take turns (default: 3)")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="per run (default: 400)")
    parser.add_argument("--rate", type=float, default=10.0, metavar="R", help="requests per second (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    names = [INSIDE, *(name for name, (program, _) in PROXIES.items() if find_program(program))]
    for missing in PROXIES.keys() - names:
        print(f"{missing} is not installed: left out", file=sys.stderr)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny_model_dir(Path(scratch) / "tiny", max_model_len=MAX_MODEL_LEN)
        for number in range(options.runs):
            trace = Path(scratch) / f"trace-{number}.jsonl"
            write_trace(trace, options.requests, options.rate, seed=number)
            for name in names:
                directory = Path(tempfile.mkdtemp(dir=scratch))
                with set_up(name, model, directory) as url:
                    runs[name].append(measure(url, trace))
                print(
                    f"run {number + 1} of {options.runs}, {name}: p99 {runs[name][-1]['ttft_ms']['p99']:.0f} ms",
                    file=sys.stderr,
                )
    table = rows(runs)
    for row in table:
        print(
            f"{row['name']:14}",
            "  ".join(f"{key} {value:5} ms" for key, value in row["ttft_ms"].items()),
            row["requests_by_rank"],
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "runs": options.runs, "rows": table}, indent=1) + "\n")
    return int(any(row["errors"] for row in table))


if __name__ == "__main__":
    sys.exit(main())

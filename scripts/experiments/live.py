"""The simulator against the product: the same minutes of a trace over HTTP, to simulated engines of the same cost model.

`gateway serve` with local processes and `gateway bench` with prompts of token ids run on this machine, in real time; `gateway
simulate` says beforehand what there is to see. What differs is what it leaves out: HTTP, sockets, and the machine's own work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from balancer.simulation.trace import load_trace, spread_buckets
from gateway.config import DEFAULT_POLICY
from scripts.benchmarks.servers import Server, end_in_order_on_sigterm, gateway, model_directory
from scripts.experiments.common import CONVERSATION, Summary, count, medians, print_table, seconds

NUM_RANKS, BLOCK_SIZE, NUM_KV_TOKENS, MAX_MODEL_LEN = 4, 16, 500_000, 131_072
COST = ("step_ms=40", "prefill_us=20", "seq_us=20", "ctx_ns=0")
ENGINE = (
    "--simulated", *COST, "--block-size", str(BLOCK_SIZE), "--num-kv-blocks", str(NUM_KV_TOKENS // BLOCK_SIZE),
    "--max-num-batched-tokens", "8192", "--max-num-seqs", "256",
)  # fmt: skip
TOLERANCE = 0.20


def simulate(trace: Path, policy: str) -> Summary:
    words = ["simulate", "--trace", str(trace), "--ranks", str(NUM_RANKS), "--policy", policy, *ENGINE]
    (summary,) = json.loads(_gateway(*words, "--json"))
    return {**summary, "policy": "simulated", "errors": summary["failed"]}


def measure(trace: Path, policy: str, run: int) -> Summary:
    flags = (
        "--engine", "simulated", *ENGINE, "--max-model-len", str(MAX_MODEL_LEN), "--load-balancing-policy", policy,
        "--data-parallel-size", str(NUM_RANKS),
    )  # fmt: skip
    with gateway("gateway", model_directory(), *flags) as server:
        psutil.cpu_times_percent()
        begin_s, used_s = time.monotonic(), cpu_s(server)
        summary = json.loads(_gateway("bench", "--url", f"http://127.0.0.1:{server.port}", "--dataset", str(trace), "--json"))
        idle = psutil.cpu_times_percent().idle
        used = (cpu_s(server) - used_s) / (time.monotonic() - begin_s)
    return {**summary, "policy": f"live, run {run}", "idle": idle, "used": used}


def cpu_s(server: Server) -> float:
    """Of the front end, the engines and the launcher."""
    root = psutil.Process(server.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True)))


def _gateway(*words: str) -> str:
    """What a command of ours prints."""
    done = subprocess.run([sys.executable, "-m", "gateway", *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def middle(runs: list[Summary]) -> Summary:
    keys = ("requests", "errors", "idle", "used", "ttft_ms", "e2e_ms")
    return {**medians([{key: run[key] for key in keys} for run in runs]), "policy": "live, median"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help=f"holds {CONVERSATION}")
    parser.add_argument("--minutes", type=float, default=3.0, metavar="M", help="of the trace (default: 3)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="medians of so many (default: 3)")
    parser.add_argument("--policy", default=DEFAULT_POLICY, metavar="P", help=f"default: {DEFAULT_POLICY}")
    args = parser.parse_args()
    end_in_order_on_sigterm()
    rows = [row for row in spread_buckets(load_trace(args.traces / CONVERSATION)) if row.arrival_s < 60 * args.minutes]
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.jsonl"
        trace.write_text(
            "".join(
                json.dumps({
                    "timestamp": 1e3 * row.arrival_s, "input_length": row.num_prompt_tokens,
                    "output_length": row.num_output_tokens, "hash_ids": row.hash_ids,
                }) + "\n"
                for row in rows
            )
        )  # fmt: skip
        expected = simulate(trace, args.policy)
        runs = [measure(trace, args.policy, run + 1) for run in range(args.runs)]
    seen = middle(runs)
    columns = [
        count("requests"),
        ("failed", lambda summary: f"{summary['errors']:.0f}"),
        *((f"TTFT {share}, s", seconds("ttft_ms", share)) for share in ("mean", "p50", "p90", "p99")),
        *((f"end to end {share}, s", seconds("e2e_ms", share)) for share in ("p50", "p90")),
        ("CPU idle", lambda summary: f"{summary['idle']:.0f} %" if "idle" in summary else "–"),
        ("cores that the server used", lambda summary: f"{summary['used']:.2f}" if "used" in summary else "–"),
    ]
    print_table([expected, *runs, seen], columns, head=f"{args.policy}, {NUM_RANKS} ranks, {args.minutes:g} minutes")
    ratios = {share: seen["ttft_ms"][share] / expected["ttft_ms"][share] for share in ("p50", "p90", "p99")}
    print("TTFT, live over simulated: " + ", ".join(f"{share} {ratio:.2f}" for share, ratio in ratios.items()))
    return 0 if all(abs(ratios[share] - 1.0) <= TOLERANCE for share in ("p50", "p90")) else 1


if __name__ == "__main__":
    sys.exit(main())

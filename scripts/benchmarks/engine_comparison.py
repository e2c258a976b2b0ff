"""Our engine beside others, end to end: output tokens per second over HTTP, and of `transformers` alone.

Servers use all cores, one after the other, and take turns. Each request streams; no two prompts are equal.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import urllib.request
from collections.abc import Iterator, Sequence

from scripts.benchmarks.load import closed_loop
from scripts.benchmarks.prompts import SAMPLE_WORDS, completion_body
from scripts.benchmarks.report import Row, compare
from scripts.benchmarks.servers import Peers, Server, gateway
from scripts.benchmarks.transformers_speed import METHODS, tokens_per_s

OURS, EAGER, COMPILED = "gateway serve", "vllm serve, eager", "vllm serve, compiled"
NUM_PROMPT_TOKENS, MAX_TOKENS = 94, 64
CONCURRENCIES = (1, 8, 32)
NUM_ROUNDS = 3  # requests per connection and run
LIMITS = ("--max-model-len", "2048", "--max-num-seqs", "64")

Speeds = dict[str, dict[int, list[float]]]  # by who and concurrency, one per run


def compare_engines(model: str, peers: Peers, num_runs: int, concurrencies: Sequence[int]) -> list[Row]:
    speeds = _servers(model, peers, num_runs, concurrencies) | _transformers(model, num_runs, concurrencies)
    rows = []
    for peer in (EAGER, COMPILED, *map(_transformers_name, METHODS)):
        for concurrency in concurrencies:
            theirs = speeds[peer][concurrency] if peer in speeds else None
            rows.append(compare(f"output at concurrency {concurrency}", "tok/s", speeds[OURS][concurrency], peer, theirs))
    return rows


def _servers(model: str, peers: Peers, num_runs: int, concurrencies: Sequence[int]) -> Speeds:
    rng = random.Random(0)
    with _all_servers(model, peers) as servers:
        speeds: Speeds = {server.name: {concurrency: [] for concurrency in concurrencies} for server in servers}
        token_ids = {server.name: _token_ids(server) for server in servers}
        for number in range(-1, num_runs):  # the first is not counted: caches and allocators warm up
            for concurrency in concurrencies:
                for server in servers:
                    bodies = [
                        completion_body(rng, token_ids[server.name], NUM_PROMPT_TOKENS, MAX_TOKENS)
                        for _ in range(concurrency * (1 if number < 0 else NUM_ROUNDS))
                    ]
                    result = closed_loop(server.port, "/v1/completions", bodies, concurrency)
                    _say(f"run {number + 1}: {server.name} at {concurrency}: {result.tokens_per_s:.1f} tok/s")
                    if number >= 0:
                        speeds[server.name][concurrency].append(result.tokens_per_s)
    return speeds


@contextlib.contextmanager
def _all_servers(model: str, peers: Peers) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(gateway(OURS, model, *LIMITS))]
        if peers.has_vllm:
            servers.append(stack.enter_context(peers.vllm(EAGER, model, *LIMITS, "--enforce-eager")))
            servers.append(stack.enter_context(peers.vllm(COMPILED, model, *LIMITS)))
        yield servers


def _token_ids(server: Server) -> list[int]:
    """Ids of ordinary tokens, as this server knows them."""
    body = {"model": "model", "prompt": SAMPLE_WORDS, "add_special_tokens": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return sorted(set(json.load(response)["tokens"]))


def _transformers(model: str, num_runs: int, concurrencies: Sequence[int]) -> Speeds:
    speeds: Speeds = {}
    for number in range(num_runs):
        for method in METHODS:
            for concurrency in concurrencies:
                speed = tokens_per_s(method, model, concurrency, NUM_PROMPT_TOKENS, MAX_TOKENS)
                _say(f"run {number + 1}: {_transformers_name(method)} at {concurrency}: {speed:.1f} tok/s")
                speeds.setdefault(_transformers_name(method), {}).setdefault(concurrency, []).append(speed)
    return speeds


def _transformers_name(method: str) -> str:
    return f"transformers, {method}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

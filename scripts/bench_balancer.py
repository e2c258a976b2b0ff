"""What a decision of the balancer costs: choose a rank, book the request there and release another. CPU time, one core.

Requests come every millisecond, and before each a rank reports, so that no view stays as it was for long. A prompt has 2,049
tokens, half of which one rank has in its cache. Hashing them is a row of its own.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.load_balancer import LoadBalancer
from balancer.policies import POLICIES, make_policy, make_prefix_index
from cores.block_hash import landmark_stride, prefix_keys
from cores.messages import CacheEvents, RankId, RankLoad
from scripts.benchmarks.report import Row, compare, publish

LIMITS_US = {8: 10.0, 64: 60.0}  # of the default policy
DEFAULT_POLICIES = ("least_tokens", "prefix_affinity", "session_affinity")
RANKS = (8, 64, 256, 1024)
NUM_PROMPT_TOKENS, BLOCK_SIZE = 2049, 16
TOKENS_PER_KEY = BLOCK_SIZE * landmark_stride(BLOCK_SIZE)
NUM_KEYS = NUM_PROMPT_TOKENS // TOKENS_PER_KEY
NUM_IN_FLIGHT_PER_RANK = 16


class Bench:
    """A group of ranks with requests in flight."""

    def __init__(self, policy: str, num_ranks: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._ledger = LoadLedger(make_prefix_index(policy))
        self._balancer = LoadBalancer(make_policy(policy, random.Random(seed)), self._ledger)
        self._ranks = [RankId(rank, 1) for rank in range(num_ranks)]
        self._seqs = dict.fromkeys(self._ranks, 0)
        self._in_flight: deque[int] = deque()
        self._handle = 0
        for rank_id in self._ranks:
            self._ledger.add_rank(rank_id, max_num_batched_tokens=8192, max_num_seqs=256, now=0.0)
            if self._ledger.prefix_index is not None:
                stored = array("Q", self._keys(rank_id.rank)[: NUM_KEYS // 2])
                self._ledger.prefix_index.on_events(CacheEvents(rank_id, 0, True, stored, array("Q")))
        self.run(NUM_IN_FLIGHT_PER_RANK * num_ranks, num_to_keep=NUM_IN_FLIGHT_PER_RANK * num_ranks)

    def _keys(self, conversation: int) -> range:
        return range(conversation << 32, (conversation << 32) + NUM_KEYS)

    def _make_request(self) -> RoutingRequest:
        keys = tuple(self._keys(self._rng.randrange(len(self._ranks)))) if self._ledger.prefix_index is not None else ()
        return RoutingRequest(
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            block_keys=keys,
            tokens_per_key=TOKENS_PER_KEY,
            session_id=str(self._rng.randrange(10**6)),
        )

    def run(self, num_decisions: int, num_to_keep: int | None = None) -> float:
        """Seconds of CPU for the decisions alone."""
        num_to_keep = len(self._in_flight) if num_to_keep is None else num_to_keep
        total_ns = 0
        for _ in range(num_decisions):
            self._handle += 1
            handle, now, request = self._handle, self._handle * 1e-3, self._make_request()
            self._report(self._rng.choice(self._ranks), now)
            started_ns = time.perf_counter_ns()
            choice = self._balancer.choose(request, self._ranks, now)
            rank_id = choice.rank_id
            num_new_tokens = request.num_prompt_tokens - choice.num_cached_tokens
            self._ledger.book(handle, rank_id, num_new_tokens, request.block_keys)
            self._seqs[rank_id] += 1
            self._ledger.on_sent(handle, self._seqs[rank_id])
            self._in_flight.append(handle)
            if len(self._in_flight) > num_to_keep:
                self._ledger.release(self._in_flight.popleft())
            total_ns += time.perf_counter_ns() - started_ns
        return total_ns * 1e-9

    def _report(self, rank_id: RankId, now: float) -> None:
        held = len(self._ledger.handles_on(rank_id))
        load = RankLoad(num_running=held, num_decodes=held, num_prefill_tokens=self._rng.randrange(4000), num_kv_blocks=1000)
        self._ledger.on_report(rank_id, self._handle, self._seqs[rank_id], load, now)


def decision_row(policy: str, num_ranks: int, runs: int) -> Row:
    num_decisions = max(500, 20_000 // num_ranks)
    figures = [Bench(policy, num_ranks, seed).run(num_decisions) / num_decisions * 1e6 for seed in range(runs)]
    limit = LIMITS_US.get(num_ranks)
    name = f"{policy}, {num_ranks} ranks"
    if limit is None:
        return Row(name, sorted(figures)[len(figures) // 2], "no limit", None, None, "µs per decision")
    return compare(name, "µs per decision", figures, "limit", [limit])


def hashing_row(runs: int) -> Row:
    prompt = list(range(NUM_PROMPT_TOKENS))
    figures = []
    for _ in range(runs):
        started = time.perf_counter()
        for _ in range(200):
            prefix_keys(prompt, BLOCK_SIZE)
        figures.append((time.perf_counter() - started) / 200 * 1e6)
    return Row(
        f"hashing {NUM_PROMPT_TOKENS // BLOCK_SIZE} blocks", sorted(figures)[runs // 2], "no limit", None, None, "µs per prompt"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_balancer", description=__doc__)
    parser.add_argument(
        "--policy", nargs="+", choices=list(POLICIES), default=DEFAULT_POLICIES, metavar="NAME",
        help=f"which (default: {' '.join(DEFAULT_POLICIES)})",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, metavar="N", help=f"how many (default: {' '.join(map(str, RANKS))})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of each figure; medians count (default: 5)")
    args = parser.parse_args(arguments)
    rows = [decision_row(policy, num_ranks, args.runs) for policy in args.policy for num_ranks in args.ranks]
    publish([*rows, hashing_row(args.runs)], args.runs, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a decision of the balancer costs: choose a rank, book the request there and release another. CPU time, one core.

Requests come every millisecond, and as many reports, so that no view stays as it was for long. A prompt has 1,025 tokens, half
of which one rank has in its cache; the rest is stored by the end of the request. Hashing them is a row of its own, and so are
the cache events.
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
from statistics import median

from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.load_balancer import LoadBalancer
from balancer.policies import POLICIES, make_policy, make_prefix_index
from balancer.prefix_index import PrefixIndex
from cores.block_hash import BlockKey, landmark_stride, prefix_keys
from cores.messages import CacheEvents, RankId, RankLoad
from scripts.benchmarks.report import Row, compare, publish

LIMITS_US = {8: 10.0, 64: 60.0}  # of the default policy
DEFAULT_POLICIES = ("least_tokens", "prefix_affinity", "session_affinity")
RANKS = (8, 64, 256, 1024)
NUM_PROMPT_TOKENS, BLOCK_SIZE = 1025, 16
TOKENS_PER_KEY = BLOCK_SIZE * landmark_stride(BLOCK_SIZE)
NUM_KEYS = NUM_PROMPT_TOKENS // TOKENS_PER_KEY
NUM_IN_FLIGHT_PER_RANK = 2
BATCH = 8  # decisions that one reading of the clock is for


InFlight = tuple[int, RankId, Sequence[BlockKey]]  # handle, rank, what the rank will store of it


class Bench:
    """A group of ranks with requests in flight."""

    def __init__(self, policy: str, num_ranks: int, seed: int) -> None:
        self.decision_ns = 0
        self.events_ns = 0
        self._rng = random.Random(seed)
        self._index = make_prefix_index(policy)
        self._ledger = LoadLedger(self._index)
        self._balancer = LoadBalancer(make_policy(policy, random.Random(seed)), self._ledger)
        self._ranks = [RankId(rank, 1) for rank in range(num_ranks)]
        self._histories = [self._make_keys(NUM_KEYS // 2) for _ in self._ranks]  # in the cache of each
        self._seqs = [0] * num_ranks  # of the last commands
        self._event_seqs = dict.fromkeys(self._ranks, 1)
        self._in_flight: deque[InFlight] = deque()
        self._ended: list[InFlight] = []  # in the last batch
        self._handle = 0
        self._num_to_keep = NUM_IN_FLIGHT_PER_RANK * num_ranks
        for rank_id in self._ranks:
            self._ledger.add_rank(rank_id, max_num_batched_tokens=8192, max_num_seqs=256)
            if self._index is not None:
                history = array("Q", self._histories[rank_id.rank])
                self._index.on_events(CacheEvents(rank_id, 0, True, history, array("Q")))
        self.run(self._num_to_keep)

    def _make_keys(self, number: int) -> tuple[int, ...]:
        """Hashes, as the real ones are: numbers in a row would meet in the same places of a dictionary."""
        return tuple(self._rng.getrandbits(64) for _ in range(number))

    def _make_request(self) -> RoutingRequest:
        history = self._rng.choice(self._histories)
        keys = (*history, *self._make_keys(NUM_KEYS - len(history)))
        return RoutingRequest(
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            block_keys=keys if self._index is not None else (),
            tokens_per_key=TOKENS_PER_KEY,
            session_id=str(self._rng.randrange(10**6)),
        )

    def run(self, num_decisions: int) -> None:
        self.decision_ns = self.events_ns = 0
        for _ in range(0, num_decisions, BATCH):
            requests = [self._make_request() for _ in range(BATCH)]
            for _ in range(BATCH):
                self._report(self._rng.choice(self._ranks))
            ending = list(self._in_flight)[:BATCH] if len(self._in_flight) == self._num_to_keep else []
            if self._index is not None:
                self._tell_caches(self._index, ending)
            started_ns = time.thread_time_ns()
            self._decide(requests, len(ending))
            self.decision_ns += time.thread_time_ns() - started_ns
            self._ended = ending

    def _decide(self, requests: Sequence[RoutingRequest], num_ending: int) -> None:
        """As many end as begin, but at the very start."""
        ledger, choose, ranks, seqs, in_flight = self._ledger, self._balancer.choose, self._ranks, self._seqs, self._in_flight
        for handle, request in enumerate(requests, self._handle + 1):
            rank_id = choose(request, ranks, handle * 1e-3).rank_id
            num_new, new_keys = request.new_on(rank_id)
            ledger.book(handle, rank_id, num_new, new_keys)
            seqs[rank_id.rank] += 1
            ledger.on_sent(handle, seqs[rank_id.rank])
            in_flight.append((handle, rank_id, new_keys))
            if num_ending:
                ledger.release(in_flight.popleft()[0])
        self._handle += len(requests)

    def _report(self, rank_id: RankId) -> None:
        held = len(self._ledger.handles_on(rank_id))
        load = RankLoad(num_running=held, num_decodes=held, num_prefill_tokens=self._rng.randrange(1000), num_kv_blocks=1000)
        self._ledger.on_report(rank_id, self._handle, self._seqs[rank_id.rank], load, self._handle * 1e-3)

    def _tell_caches(self, index: PrefixIndex, ending: Sequence[InFlight]) -> None:
        """Requests that are about to end have stored what their rank computed; what ended ones left is evicted, so that the
        index stays as large as it is."""
        stored = [(rank_id, array("Q", new_keys), array("Q")) for _, rank_id, new_keys in ending]
        evicted = [(rank_id, array("Q"), array("Q", new_keys)) for _, rank_id, new_keys in self._ended]
        started_ns = time.thread_time_ns()
        for rank_id, new, gone in (*stored, *evicted):
            index.on_events(CacheEvents(rank_id, self._event_seqs[rank_id], False, new, gone))
            self._event_seqs[rank_id] += 1
        self.events_ns += time.thread_time_ns() - started_ns


def decision_rows(policy: str, num_ranks: int, runs: int) -> list[Row]:
    num_decisions = max(240, 20_000 // num_ranks // BATCH * BATCH)
    decisions, events = [], []
    for seed in range(runs):
        bench = Bench(policy, num_ranks, seed)
        bench.run(num_decisions)
        decisions.append(bench.decision_ns * 1e-3 / num_decisions)
        events.append(bench.events_ns * 1e-3 / num_decisions)
    limit = LIMITS_US.get(num_ranks)
    name = f"{policy}, {num_ranks} ranks"
    if limit is None:
        return [alone(name, decisions, "µs per decision")]
    rows = [compare(name, "µs per decision", decisions, "limit", [limit])]
    return [*rows, alone("  its cache events", events, "µs per request")] if any(events) else rows


def alone(name: str, figures: Sequence[float], unit: str) -> Row:
    return Row(name, median(figures), "no limit", None, None, unit)


def hashing_row(runs: int) -> Row:
    prompt = list(range(NUM_PROMPT_TOKENS))
    figures = []
    for _ in range(runs):
        started = time.thread_time()
        for _ in range(200):
            prefix_keys(prompt, BLOCK_SIZE)
        figures.append((time.thread_time() - started) / 200 * 1e6)
    return alone(f"hashing {NUM_PROMPT_TOKENS // BLOCK_SIZE} blocks", figures, "µs per prompt")


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
    rows = [row for policy in args.policy for num_ranks in args.ranks for row in decision_rows(policy, num_ranks, args.runs)]
    publish([*rows, hashing_row(args.runs)], args.runs, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

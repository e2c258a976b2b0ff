"""A hundred thousand requests of which one in a hundred is left by its client at a random moment: nothing may stay behind.

Seen in the field: a router that leaked one count per disconnect, until a restarted worker got all the traffic.
"""

from __future__ import annotations

import random
from collections import deque

from balancer.dispatch_queue import DispatchQueue
from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policies import make_policy, make_prefix_index
from balancer.testing import make_request
from cores.messages import RankId, RankLoad

NUM_RANKS = 4
MAX_SEQS = 32


class Rank:
    """Does in a step what has reached it, and tells some steps later."""

    def __init__(self, rank_id: RankId) -> None:
        self.rank_id = rank_id
        self.last_sent = 0
        self.last_read = 0
        self.step = 0
        self.commands: deque[tuple[int, int, bool]] = deque()  # number, handle, is an abort
        self.held: dict[int, int] = {}  # handle → steps left
        self.reports: deque[tuple[int, int, RankLoad, list[int]]] = deque()

    def send(self, handle: int, is_abort: bool = False) -> int:
        self.last_sent += 1
        self.commands.append((self.last_sent, handle, is_abort))
        return self.last_sent

    def run_step(self, rng: random.Random) -> None:
        for _ in range(min(len(self.commands), rng.randrange(20))):  # some are still on the way
            self.last_read, handle, is_abort = self.commands.popleft()
            if is_abort:
                self.held.pop(handle, None)
            else:
                self.held[handle] = rng.randrange(1, 6)
        for handle in self.held:
            self.held[handle] -= 1
        finished = [handle for handle, left in self.held.items() if left == 0]
        for handle in finished:
            del self.held[handle]
        self.step += 1
        load = RankLoad(num_running=len(self.held), num_decodes=len(self.held))
        self.reports.append((self.step, self.last_read, load, finished))


class Endpoint:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ledger = LoadLedger(make_prefix_index("prefix_affinity"))
        self.queue = DispatchQueue(LoadBalancer(make_policy("prefix_affinity", self.rng), self.ledger))
        self.ranks = {RankId(rank, 1): Rank(RankId(rank, 1)) for rank in range(NUM_RANKS)}
        self.now = 0.0
        self.live: list[int] = []
        self.num_disconnects = 0
        self.num_released = 0
        for rank_id in self.ranks:
            self.ledger.add_rank(rank_id, max_num_batched_tokens=2048, max_num_seqs=MAX_SEQS)

    def arrive(self, handle: int) -> None:
        start = 1000 * self.rng.randrange(50)
        num_blocks = self.rng.randrange(1, 12)
        request = make_request(16 * num_blocks + 1, block_keys=tuple(range(start, start + num_blocks)), tokens_per_key=16)
        self.queue.add(handle, request, self.now)
        self.live.append(handle)
        self.dispatch()

    def dispatch(self) -> None:
        for dispatch in self.queue.dispatches(lambda _: list(self.ranks), self.now):
            if self.rng.random() < 0.002:  # it could not be sent
                self.ledger.release(dispatch.handle)
                self.num_released += 1
                continue
            self.ledger.on_sent(dispatch.handle, self.ranks[dispatch.choice.rank_id].send(dispatch.handle))

    def disconnect(self) -> None:
        """Of a client whose request may wait here, be on its way, be served, or have ended while nobody looked."""
        handle = self.live[self.rng.randrange(len(self.live))]
        rank_id = self.ledger.rank_of(handle)
        self.num_disconnects += 1
        if self.queue.remove(handle):
            self.num_released += 1
        elif rank_id is not None:
            self.num_released += self.ledger.release(handle, self.ranks[rank_id].send(handle, is_abort=True))
        self.dispatch()

    def hear(self, max_delay: int) -> None:
        """Reports come in order, up to so many steps late, and sometimes a load comes twice."""
        for rank in self.ranks.values():
            while rank.reports and (len(rank.reports) > max_delay or self.rng.random() < 0.5):
                step, command_seq, load, finished = rank.reports.popleft()
                for _ in range(1 + (self.rng.random() < 0.1)):
                    self.ledger.on_report(rank.rank_id, step, command_seq, load, self.now)
                for handle in finished:
                    self.num_released += self.ledger.release(handle)
        self.dispatch()

    def turn(self) -> None:
        self.now += 0.01
        for rank in self.ranks.values():
            rank.run_step(self.rng)
        self.hear(max_delay=3)
        if len(self.live) > 2000:
            del self.live[:1000]


def test_ledger_is_exactly_zero_after_random_disconnects() -> None:
    endpoint, num_requests = Endpoint(seed=7), 100_000
    for handle in range(1, num_requests + 1):
        endpoint.arrive(handle)
        if endpoint.rng.random() < 0.01:
            endpoint.disconnect()
        if handle % 16 == 0:
            endpoint.turn()
    while endpoint.ledger.num_in_flight or len(endpoint.queue) or any(rank.commands for rank in endpoint.ranks.values()):
        endpoint.turn()
    endpoint.hear(max_delay=0)
    assert endpoint.num_disconnects > 0.008 * num_requests
    assert endpoint.num_released == num_requests  # each exactly once
    assert endpoint.ledger.num_unreported_tokens == 0
    for rank_id in endpoint.ranks:
        view = endpoint.ledger.view(rank_id)
        assert (view.num_requests, view.num_prefill_tokens, view.own_in_flight) == (0, 0, 0)
        assert endpoint.ledger.booked_tokens(rank_id) == 0
    index = endpoint.ledger.prefix_index
    assert index is not None
    assert index.num_blocks == 0
    assert not index.booked_handles
    endpoint.ledger.check_invariants()
    endpoint.queue.check_invariants()

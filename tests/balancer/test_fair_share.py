"""Equal shares of what is served for tenants that ask for more than there is."""

from __future__ import annotations

import random

import pytest

from balancer.dispatch_queue import DispatchOrder, DispatchQueue
from balancer.fair_share import OUTPUT_WEIGHT, FairShare
from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policies import make_policy
from balancer.testing import make_request
from cores.messages import RankId, RankLoad

RANK = RankId(0, 1)
MAX_PROMPT, MAX_OUTPUT, MAX_SEQS = 900, 200, 4


class Server:
    """One rank behind a queue in which every tenant has more requests waiting than a pass can take."""

    def __init__(self, order: DispatchOrder, num_waiting: dict[str, int], seed: int) -> None:
        ledger = LoadLedger()
        ledger.add_rank(RANK, max_num_batched_tokens=1000, max_num_seqs=MAX_SEQS)
        self.ledger = ledger
        self.queue = DispatchQueue(LoadBalancer(make_policy("least_tokens", random.Random(seed)), ledger), order)
        self.served = dict.fromkeys(num_waiting, 0.0)
        self.max_gap = 0.0
        self._rng = random.Random(seed)
        self._num_waiting = num_waiting
        self._waiting = dict.fromkeys(num_waiting, 0)
        self._tenants: dict[int, str] = {}  # by handle, of all that came
        self._prompts: dict[int, int] = {}
        self._to_come: dict[int, int] = {}  # tokens, of those at the rank
        self._step = 0
        self._last_seq = 0

    def run(self, num_steps: int) -> None:
        for self._step in range(1, num_steps + 1):
            for tenant, number in self._num_waiting.items():
                while self._waiting[tenant] < number:
                    self._come(tenant)
            for dispatch in self.queue.dispatches(lambda _: [RANK], float(self._step)):
                self._begin(dispatch.handle)
            self._decode()
            self.queue.check_invariants()
            self.ledger.check_invariants()

    def _come(self, tenant: str) -> None:
        self._waiting[tenant] += 1
        handle = len(self._tenants) + 1
        self._tenants[handle], self._prompts[handle] = tenant, self._rng.randint(1, MAX_PROMPT)
        self.queue.add(handle, make_request(self._prompts[handle], tenant=tenant), float(self._step))

    def _begin(self, handle: int) -> None:
        self._waiting[self._tenants[handle]] -= 1
        self._last_seq += 1
        self.ledger.on_sent(handle, self._last_seq)
        self._to_come[handle] = self._rng.randint(1, MAX_OUTPUT)
        self._count(handle, self._prompts[handle])

    def _decode(self) -> None:
        """Some tokens for each, as a step of the rank would have."""
        for handle in list(self._to_come):
            number = min(self._rng.randint(1, 20), self._to_come[handle])
            self._to_come[handle] -= number
            self.queue.on_tokens(self._tenants[handle], number)
            self._count(handle, OUTPUT_WEIGHT * number)
            if not self._to_come[handle]:
                del self._to_come[handle]
                self.ledger.release(handle)
        held = len(self._to_come)
        load = RankLoad(num_running=held, num_decodes=held)
        self.ledger.on_report(RANK, self._step, self._last_seq, load, float(self._step))

    def _count(self, handle: int, tokens: float) -> None:
        self.served[self._tenants[handle]] += tokens
        self.max_gap = max(self.max_gap, max(self.served.values()) - min(self.served.values()))


BOUND = MAX_PROMPT + OUTPUT_WEIGHT * MAX_OUTPUT * MAX_SEQS  # one prompt, and what all that a rank holds may still be given


@pytest.mark.parametrize("seed", range(5))
def test_tenants_that_always_wait_get_the_same_within_a_bound_that_does_not_grow(seed: int) -> None:
    server = Server("fair", {"greedy": 60, "modest": 6, "shy": 6}, seed)
    server.run(600)
    assert server.max_gap <= BOUND
    assert min(server.served.values()) > 10 * BOUND


def test_by_arrival_whoever_sends_most_gets_most() -> None:
    server = Server("fcfs", {"greedy": 60, "modest": 6, "shy": 6}, seed=0)
    server.run(600)
    assert server.max_gap > 10 * BOUND


def test_alone_a_tenant_gets_all_there_is() -> None:
    alone, one_of_three = Server("fair", {"a": 5}, seed=1), Server("fair", {"a": 5, "b": 5, "c": 5}, seed=1)
    alone.run(200)
    one_of_three.run(200)
    assert alone.served["a"] == pytest.approx(sum(one_of_three.served.values()), rel=0.1)


def test_what_a_tenant_did_not_use_is_not_kept_for_it() -> None:
    share = FairShare()
    share.begin_waiting("a")
    share.on_dispatch("a", 5000)
    share.begin_waiting("b")
    assert share.served("b") == share.served("a") == 5000
    share.on_tokens("b", 10)
    assert share.served("b") == 5000 + OUTPUT_WEIGHT * 10


def test_who_comes_when_nobody_waits_begins_where_the_last_one_was() -> None:
    share = FairShare()
    share.begin_waiting("a")
    share.on_dispatch("a", 5000)
    share.end_waiting("a")
    share.begin_waiting("b")
    assert share.served("b") == 5000
    share.on_dispatch("b", 100)
    share.begin_waiting("a")
    assert share.served("a") == 5100


def test_of_tenants_that_come_once_few_are_remembered_and_they_cannot_push_out_who_was_served_much() -> None:
    share = FairShare(max_idle_tenants=100)
    share.begin_waiting("steady")
    share.begin_waiting("much")
    share.on_dispatch("much", 50_000)
    share.on_tokens("much", 1)
    share.end_waiting("much")
    for number in range(5_000):  # as many as it takes: none of them can push it out
        tenant = f"once-{number}"
        share.begin_waiting(tenant)
        share.on_dispatch(tenant, 5)
        share.end_waiting(tenant)
        share.on_tokens(tenant, 1)
        share.on_dispatch("steady", 1)
        share.check_invariants()
    assert share.served("much") == 50_000 + OUTPUT_WEIGHT


def test_who_was_forgotten_is_served_as_one_that_comes_new() -> None:
    share = FairShare(max_idle_tenants=1)
    share.begin_waiting("a")
    for tenant, tokens in (("b", 1), ("c", 2)):
        share.begin_waiting(tenant)
        share.on_dispatch(tenant, tokens)
        share.end_waiting(tenant)
    share.on_dispatch("a", 700)
    assert share.served("b") == share.served("c") == share.served("nobody yet") == 700
    share.begin_waiting("b")
    share.on_dispatch("b", 5)
    assert share.served("b") == 705
    share.check_invariants()

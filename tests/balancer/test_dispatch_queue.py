from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from balancer.dispatch_queue import AGEING_S, DEPTH_STEPS, LOOK_AHEAD, DispatchOrder, DispatchQueue, has_room
from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policies import make_policy, make_prefix_index
from balancer.testing import make_request, make_view
from cores.messages import RankId, RankLoad

STEP = 1000
FULL = int(DEPTH_STEPS * STEP)


class Group:
    """Ranks that compute only when a test says so, behind a queue."""

    def __init__(
        self, num_ranks: int, order: DispatchOrder = "fcfs", policy: str = "least_tokens", num_front_ends: int = 1
    ) -> None:
        self.ledger = LoadLedger(make_prefix_index(policy))
        self.queue = DispatchQueue(LoadBalancer(make_policy(policy, random.Random(3)), self.ledger), order, num_front_ends)
        self.ranks = [RankId(rank, 1) for rank in range(num_ranks)]
        self.last_seq = 0
        self.step = 0
        for rank_id in self.ranks:
            self.begin_life(rank_id)

    def begin_life(self, rank_id: RankId) -> None:
        self.ledger.add_rank(rank_id, max_num_batched_tokens=STEP, max_num_seqs=64)

    def eligible(self, lora_name: str | None) -> Collection[RankId]:
        return self.ranks

    def run_pass(self, now: float = 0.0) -> list[tuple[int, int]]:
        """What is sent, as (handle, rank)."""
        sent = []
        for dispatch in self.queue.dispatches(self.eligible, now):
            self.last_seq += 1
            self.ledger.on_sent(dispatch.handle, self.last_seq)
            sent.append((dispatch.handle, dispatch.choice.rank_id.rank))
        self.queue.check_invariants()
        self.ledger.check_invariants()
        return sent

    def finish(self, handle: int) -> None:
        rank_id = self.ledger.rank_of(handle)
        assert rank_id is not None
        self.ledger.release(handle)
        self.step += 1
        held = len(self.ledger.handles_on(rank_id))
        self.ledger.on_report(rank_id, self.step, self.last_seq, RankLoad(num_running=held, num_decodes=held), now=0.0)


@pytest.fixture
def one() -> Group:
    return Group(1)


def fill(group: Group, now: float = 0.0) -> None:
    """A prompt as long as a rank has room for on every rank."""
    for rank in range(len(group.ranks)):
        group.queue.add(900 + rank, make_request(FULL), now)
    assert len(group.run_pass(now)) == len(group.ranks)


def test_idle_rank_gets_a_request_at_once(one: Group) -> None:
    one.queue.add(1, make_request(100), now=0.0)
    assert one.run_pass() == [(1, 0)]
    assert (len(one.queue), one.ledger.num_in_flight) == (0, 1)


def test_requests_wait_while_no_rank_has_room_and_go_when_one_has(one: Group) -> None:
    fill(one)
    one.queue.add(1, make_request(100), now=0.0)
    assert one.run_pass() == []
    assert (len(one.queue), one.queue.num_tokens, one.ledger.num_in_flight) == (1, 100, 1)
    one.finish(900)
    assert one.run_pass() == [(1, 0)]


def test_a_rank_gets_a_little_more_than_its_room_and_no_more(one: Group) -> None:
    for handle in range(1, 21):
        one.queue.add(handle, make_request(300), now=0.0)
    assert len(one.run_pass()) == -(-FULL // 300)


def test_burst_is_spread_by_tokens() -> None:
    group = Group(4)
    for handle in range(1, 41):
        group.queue.add(handle, make_request(100), now=0.0)
    sent = group.run_pass()
    assert [sum(rank == r for _, rank in sent) for r in range(4)] == [10] * 4


# --- order --------------------------------------------------------------------------------------------------------------


def order_of(group: Group, now: float = 0.0) -> list[int]:
    """Everything that waits, one at a time."""
    order = []
    group.finish(900)
    while sent := group.run_pass(now):
        assert len(sent) == 1
        order.append(sent[0][0])
        group.finish(sent[0][0])
    return order


def add_full(group: Group, handle: int, now: float, priority: int = 0) -> None:
    group.queue.add(handle, make_request(FULL, priority=priority), now)


def test_urgent_requests_pass_those_that_wait(one: Group) -> None:
    fill(one)
    add_full(one, 1, 0.0, priority=1)
    add_full(one, 2, 0.1)
    add_full(one, 3, 0.2, priority=-1)
    add_full(one, 4, 0.3)
    assert order_of(one) == [3, 2, 4, 1]


def test_waiting_long_enough_makes_up_for_priority(one: Group) -> None:
    fill(one)
    add_full(one, 1, now=0.0, priority=2)
    add_full(one, 2, now=2 * AGEING_S - 0.1)
    add_full(one, 3, now=2 * AGEING_S + 0.1)
    assert order_of(one) == [2, 1, 3]


def test_shortest_first_ages_too() -> None:
    group = Group(1, order="shortest")
    fill(group)
    group.queue.add(1, make_request(20 * FULL), now=0.0)
    group.queue.add(2, make_request(FULL), now=1.0)
    group.queue.add(3, make_request(FULL), now=60.0)
    assert order_of(group) == [2, 1, 3]


# --- who waits for a rank of its own --------------------------------------------------------------------------------------


def test_tenant_that_sends_little_is_next_however_many_another_has_waiting() -> None:
    group = Group(1, "fair")
    fill(group)
    for handle in range(20):
        group.queue.add(handle, make_request(FULL, tenant="greedy"), now=1.0)
    group.queue.add(50, make_request(FULL, tenant="modest"), now=2.0)
    order = []
    for last in (900, *range(10)):
        group.finish(order[-1] if order else last)
        order += [handle for handle, _ in group.run_pass(now=3.0)]
        if 50 in order:
            break
    assert order == [0, 50]


def test_requests_of_one_tenant_for_a_busy_rank_do_not_hide_anothers() -> None:
    """As many as a pass looks at wait for rank 0."""
    group = Group(2, "fair")
    fill(group)
    for handle in range(2 * LOOK_AHEAD):
        group.queue.add(handle, make_request(100, tenant="greedy", pinned_rank=0), now=1.0)
    group.queue.add(500, make_request(100, tenant="modest"), now=2.0)
    assert group.run_pass(now=3.0) == []
    group.finish(901)
    assert group.run_pass(now=3.0) == [(500, 1)]


def test_request_that_waits_for_its_rank_does_not_block_those_behind_it() -> None:
    group = Group(2)
    fill(group)
    group.queue.add(1, make_request(100, pinned_rank=0), now=0.0)
    group.queue.add(2, make_request(100), now=0.0)
    group.finish(901)
    assert group.run_pass() == [(2, 1)]
    group.finish(900)
    assert group.run_pass() == [(1, 0)]


def test_nobody_passes_on_the_way_to_the_same_rank() -> None:
    group = Group(2)
    fill(group)
    for handle in (1, 2, 3):
        group.queue.add(handle, make_request(FULL, pinned_rank=0), now=0.0)
    group.finish(900)
    assert group.run_pass() == [(1, 0)]
    group.finish(1)
    assert group.run_pass() == [(2, 0)]


def test_second_who_waits_for_a_cache_sees_the_first_and_goes_elsewhere() -> None:
    """All have three quarters of their prompts in the busy rank's cache. That is worth a wait, but not behind another."""
    group = Group(2, policy="prefix_affinity")
    keys = tuple(range(50))
    group.queue.add(1, make_request(FULL, block_keys=keys, tokens_per_key=24), now=0.0)
    ((_, home),) = group.run_pass()
    for handle in (2, 3, 4):
        group.queue.add(handle, make_request(1600, block_keys=keys, tokens_per_key=24), now=0.0)
    sent = group.run_pass()
    assert sent
    assert all(rank != home for _, rank in sent)
    assert 2 not in dict(sent)


def test_look_ahead_is_bounded() -> None:
    group = Group(2)
    fill(group)
    for handle in range(1, LOOK_AHEAD + 1):
        group.queue.add(handle, make_request(10, pinned_rank=0), now=0.0)
    group.queue.add(500, make_request(10), now=0.0)
    group.finish(901)
    assert group.run_pass() == []
    group.queue.remove(1)
    assert group.run_pass() == [(500, 1)]


def test_requests_for_a_rank_that_is_gone_do_not_stop_the_others() -> None:
    """As many as a pass looks at."""
    group = Group(2)
    gone = group.ranks.pop()
    group.ledger.remove_rank(gone)
    for handle in range(1, LOOK_AHEAD + 1):
        group.queue.add(handle, make_request(10, pinned_rank=gone.rank), now=0.0)
    group.queue.add(500, make_request(10), now=0.0)
    assert group.run_pass() == [(500, 0)]


# --- ends ---------------------------------------------------------------------------------------------------------------


def test_no_token_is_spent_on_who_is_too_late(one: Group) -> None:
    fill(one)
    one.queue.add(1, make_request(100), now=0.0, deadline=2.0)
    one.queue.add(2, make_request(100), now=0.0, deadline=2.1)
    one.finish(900)
    assert one.run_pass(now=2.0) == [(2, 0)]
    assert 1 in one.queue
    assert one.queue.remove(1)


def test_abort_in_the_queue_touches_no_rank(one: Group) -> None:
    fill(one)
    one.queue.add(1, make_request(100), now=0.0)
    assert one.queue.remove(1)
    assert not one.queue.remove(1)
    one.finish(900)
    assert one.run_pass() == []
    assert one.ledger.num_in_flight == 0


def test_death_moves_only_what_was_sent() -> None:
    group = Group(2)
    fill(group)
    for handle in (1, 2, 3):
        group.queue.add(handle, make_request(100), now=0.0)
    assert group.ledger.remove_rank(RankId(0, 1)) == [900]
    del group.ranks[0]
    group.finish(901)
    assert group.run_pass() == [(1, 1), (2, 1), (3, 1)]


def test_without_ranks_all_wait(one: Group) -> None:
    one.queue.add(1, make_request(100), now=0.0)
    one.queue.add(2, make_request(100, pinned_rank=0), now=0.0)
    one.ledger.remove_rank(one.ranks.pop())
    assert one.run_pass() == []
    assert len(one.queue) == 2


def test_request_that_could_not_be_sent_is_queued_again(one: Group) -> None:
    one.queue.add(1, make_request(100), now=0.0)
    for dispatch in one.queue.dispatches(one.eligible, now=1.0):
        one.ledger.release(dispatch.handle)
        break
    one.queue.add(1, make_request(100), now=0.0)
    assert one.run_pass() == [(1, 0)]


# --- room ---------------------------------------------------------------------------------------------------------------


def test_each_of_four_front_ends_takes_a_quarter_of_the_room() -> None:
    sizes = []
    for _ in range(4):
        group = Group(1, num_front_ends=4)
        for handle in range(1, 101):
            group.queue.add(handle, make_request(50), now=0.0)
        sizes.append(50 * len(group.run_pass()))
    assert sum(sizes) == FULL


def test_what_others_have_sent_counts_once_it_is_reported() -> None:
    assert has_room(make_view(num_prefill_tokens=16_000), num_front_ends=1)
    assert not has_room(make_view(num_prefill_tokens=16_384), num_front_ends=1)
    assert not has_room(make_view(num_prefill_tokens=16_000 + 100, num_unreported_tokens=100), num_front_ends=4)


def test_places_are_shared_among_front_ends_like_tokens() -> None:
    assert has_room(make_view(num_running=8, num_waiting=3, num_unreported=3, max_num_seqs=24), num_front_ends=4)
    assert not has_room(make_view(num_running=8, num_waiting=5, num_unreported=5, max_num_seqs=24), num_front_ends=4)


def test_rank_without_places_or_blocks_has_no_room() -> None:
    assert has_room(make_view(num_running=256))  # one of them may end in this very step
    assert not has_room(make_view(num_running=272))
    assert not has_room(make_view(num_running=10, num_waiting=1, kv_cache_usage=0.99))
    assert has_room(make_view(num_running=10, kv_cache_usage=0.99))


# --- whatever happens -----------------------------------------------------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """Requests come, leave, expire, finish; ranks die and come back. Whatever happens, a pass leaves no rank idle that it
    should not, keeps order on the way to each rank, and every request is in one place or has had one end."""

    @initialize(order=st.sampled_from(["fcfs", "shortest", "fair"]))
    def start(self, order: DispatchOrder) -> None:
        self.group = Group(3, order, policy="prefix_affinity")
        self.now = 0.0
        self.waiting: set[int] = set()
        self.sent: set[int] = set()
        self.deadlines: dict[int, float] = {}
        self.pins: dict[int, int | None] = {}
        self.last_epoch = 1
        self.last_handle = 0

    @rule(
        tokens=st.integers(1, 3 * STEP), priority=st.integers(-1, 1), prompt=st.integers(0, 3),
        deadline_in=st.none() | st.floats(0, 5), pinned=st.none() | st.integers(0, 2), tenant=st.sampled_from([None, "a", "b"]),
    )  # fmt: skip
    def comes(
        self, tokens: int, priority: int, prompt: int, deadline_in: float | None, pinned: int | None, tenant: str | None
    ) -> None:
        self.last_handle += 1
        keys = tuple(range(1000 * prompt, 1000 * prompt + tokens // 100))
        request = make_request(
            tokens, priority=priority, block_keys=keys, tokens_per_key=100, pinned_rank=pinned, tenant=tenant
        )
        deadline = None if deadline_in is None else self.now + deadline_in
        self.group.queue.add(self.last_handle, request, self.now, deadline)
        self.waiting.add(self.last_handle)
        self.pins[self.last_handle] = pinned
        if deadline is not None:
            self.deadlines[self.last_handle] = deadline

    @rule()
    def those_who_are_too_late_are_taken_out(self) -> None:
        for handle in [h for h in self.waiting if self.is_late(h)]:
            assert self.group.queue.remove(handle)
            self.waiting.remove(handle)

    def is_late(self, handle: int) -> bool:
        return self.deadlines.get(handle, self.now + 1) <= self.now

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def runs_a_pass(self) -> None:
        for handle, _ in self.group.run_pass(self.now):
            assert handle in self.waiting
            assert not self.is_late(handle)
            self.waiting.remove(handle)
            self.sent.add(handle)
        self.no_idle_rank_is_wanted()

    def no_idle_rank_is_wanted(self) -> None:
        """An idle rank has room, so whoever wants it has got it; and if all want others, at least one rank is busy."""
        group = self.group
        idle = [rank_id for rank_id in group.ranks if not group.ledger.handles_on(rank_id)]
        there = {rank_id.rank for rank_id in group.ranks}
        could_go = [h for h in self.waiting if not self.is_late(h) and self.pins[h] in (None, *there)]
        if could_go and there and len(self.waiting) < LOOK_AHEAD:
            assert len(idle) < len(group.ranks)
            assert not {self.pins[h] for h in could_go} & {rank_id.rank for rank_id in idle}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leaves_the_queue(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.group.queue.remove(handle)
        self.waiting.remove(handle)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.sent)))
        self.group.finish(handle)
        self.sent.remove(handle)

    @rule(rank=st.integers(0, 2))
    def dies_or_comes_back(self, rank: int) -> None:
        group = self.group
        alive = next((rank_id for rank_id in group.ranks if rank_id.rank == rank), None)
        if alive is None:
            self.last_epoch += 1
            group.ranks.append(RankId(rank, self.last_epoch))
            group.begin_life(group.ranks[-1])
        else:
            group.ranks.remove(alive)
            self.sent -= set(group.ledger.remove_rank(alive))

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        group = self.group
        group.queue.check_invariants()
        assert len(group.queue) == len(self.waiting)
        assert all(handle in group.queue for handle in self.waiting)
        assert group.ledger.num_in_flight == len(self.sent)

    def teardown(self) -> None:
        """With ranks that have nothing to do, all go in the end."""
        for rank in range(3):
            if not any(rank_id.rank == rank for rank_id in self.group.ranks):
                self.dies_or_comes_back(rank)
        while self.waiting - set(self.deadlines):
            for handle in sorted(self.sent):
                self.finishes_now(handle)
            before = len(self.waiting)
            self.runs_a_pass()
            assert len(self.waiting) < before

    def finishes_now(self, handle: int) -> None:
        self.group.finish(handle)
        self.sent.remove(handle)


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestQueueMachine = QueueMachine.TestCase

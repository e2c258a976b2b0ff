from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.ledger import LoadLedger
from balancer.load import RankView, RoutingRequest
from balancer.load_balancer import LoadBalancer
from balancer.policies import make_policy, make_prefix_index
from balancer.policies.least_tokens import MAX_REPORT_AGE_S
from balancer.policies.prefix_affinity import COMPUTE_WEIGHT, CROWD_FACTOR, CROWD_SLACK, PrefixAffinity
from balancer.policy import Choice
from balancer.testing import make_request, make_view
from cores.block_hash import prefix_keys, root_hash
from cores.messages import CacheEvents, RankId, RankLoad

BLOCK_SIZE, TOKENS_PER_KEY = 16, 64


def choose(*ranks: RankView, num_prompt_tokens: int, cached: dict[int, int], seed: int = 7) -> Choice:
    cached_tokens = {RankId(rank, 1): num_tokens for rank, num_tokens in cached.items()}
    request = make_request(num_prompt_tokens, cached_tokens=cached_tokens)
    return PrefixAffinity(random.Random(seed)).choose(request, ranks, now=0.0)


def test_chat_goes_where_its_history_is() -> None:
    for rank in range(3):
        ranks = [make_view(r) for r in range(3)]
        assert choose(*ranks, num_prompt_tokens=2000, cached={rank: 1900}) == Choice(RankId(rank, 1), "prefix_affinity")


def test_longer_prefix_wins() -> None:
    assert choose(make_view(0), make_view(1), num_prompt_tokens=2000, cached={0: 500, 1: 1500}).rank_id.rank == 1


def test_rank_with_the_prefix_is_left_when_computing_it_elsewhere_is_quicker() -> None:
    saved = COMPUTE_WEIGHT * 1600

    def chosen(queued: float) -> int:
        busy = make_view(0, num_prefill_tokens=int(queued))
        return choose(busy, make_view(1), num_prompt_tokens=2000, cached={0: 1600}).rank_id.rank

    assert chosen(0) == chosen(saved - 10) == 0
    assert chosen(saved + 10) == 1


def test_without_a_prefix_the_least_tokens_win() -> None:
    assert choose(make_view(0, num_prefill_tokens=900), make_view(1), num_prompt_tokens=100, cached={}).rank_id.rank == 1


def test_session_decides_between_ranks_that_cost_alike_and_on_every_front_end_alike() -> None:
    def homes(session: str, *ranks: RankView) -> set[int]:
        policies = [PrefixAffinity(random.Random(seed)) for seed in range(3)]
        request = make_request(20, session_id=session)
        return {policy.choose(request, ranks, now=0.0).rank_id.rank for policy in policies for _ in range(3)}

    chosen = [homes(f"session-{number}", make_view(0), make_view(1)) for number in range(100)]
    assert all(len(ranks) == 1 for ranks in chosen)
    assert 35 < sum(ranks == {0} for ranks in chosen) < 65
    assert all(homes(f"session-{number}", make_view(0, num_waiting=1), make_view(1)) == {1} for number in range(20))


def test_old_report_of_the_rank_with_the_prefix_widens_the_choice() -> None:
    stale = make_view(0, reported_at=-MAX_REPORT_AGE_S - 1, own_in_flight=5)
    assert choose(stale, make_view(1), num_prompt_tokens=2000, cached={0: 1900}) == Choice(RankId(1, 1), "old_report")


@dataclass(frozen=True)
class Drawn:
    queued: int
    num_running: int
    kv_cache_usage: float
    rate: float
    cached: int  # in hundredths of the prompt
    own_in_flight: int

    def view(self, rank: int) -> RankView:
        fields = {"num_prefill_tokens": self.queued, "num_running": self.num_running, "kv_cache_usage": self.kv_cache_usage}
        return make_view(rank, prefill_tokens_per_s=self.rate, own_in_flight=self.own_in_flight, **fields)

    @property
    def load(self) -> int:
        fullness = max(0.0, self.kv_cache_usage - 0.8) / 0.2
        return self.queued + 32 * self.num_running + round(8192 * fullness**2)

    def cost(self, num_prompt_tokens: int, best_rate: float, calmest: Drawn) -> float:
        """As the table in the policies' README has it."""
        slowness = best_rate / self.rate if 0 < self.rate < best_rate / 1.5 else 1.0
        is_crowded = self.own_in_flight > 1.5 * calmest.own_in_flight + 16
        own = num_prompt_tokens - (0 if is_crowded else self.cached * num_prompt_tokens // 100)
        return (self.load + 2 * own) * min(10.0, slowness)


drawn = st.builds(
    Drawn,
    queued=st.integers(0, 20_000),
    num_running=st.integers(0, 200),
    kv_cache_usage=st.floats(0, 1),
    rate=st.sampled_from([0.0, 3e3, 1e4, 1.2e4]),
    cached=st.integers(0, 100),
    own_in_flight=st.integers(0, 40),
)


@given(ranks=st.lists(drawn, min_size=1, max_size=8), num_prompt_tokens=st.integers(1, 50_000))
def test_what_is_chosen_costs_least_by_the_formula(ranks: list[Drawn], num_prompt_tokens: int) -> None:
    views = [one.view(rank) for rank, one in enumerate(ranks)]
    cached = {rank: one.cached * num_prompt_tokens // 100 for rank, one in enumerate(ranks) if one.cached}
    best_rate, calmest = max(one.rate for one in ranks), min(ranks, key=lambda one: one.load)
    costs = [one.cost(num_prompt_tokens, best_rate, calmest) for one in ranks]
    chosen = choose(*views, num_prompt_tokens=num_prompt_tokens, cached=cached).rank_id.rank
    assert costs[chosen] == pytest.approx(min(costs))


# --- with the ledger and the index --------------------------------------------------------------------------------------


class Group:
    """Ranks behind a balancer, which hear and say what a test lets them."""

    def __init__(self, num_ranks: int) -> None:
        self.ledger = LoadLedger(make_prefix_index("prefix_affinity"))
        self.balancer = LoadBalancer(make_policy("prefix_affinity", random.Random(3)), self.ledger)
        self.last_handle = 0
        for rank in range(num_ranks):
            self.begin_life(RankId(rank, 1))

    def begin_life(self, rank_id: RankId) -> None:
        self.ledger.add_rank(rank_id, max_num_batched_tokens=8192, max_num_seqs=64, num_kv_blocks=1000)

    def request(self, prompt: list[int], salt: str | None = None, pinned_rank: int | None = None) -> RoutingRequest:
        keys = prefix_keys(prompt, BLOCK_SIZE, root_hash(None, salt))
        return make_request(len(prompt), block_keys=keys, tokens_per_key=TOKENS_PER_KEY, pinned_rank=pinned_rank)

    def send(self, prompt: list[int], salt: str | None = None, pinned_rank: int | None = None) -> tuple[int, RankId, int]:
        """Its handle, its rank, and how many tokens are booked there for it."""
        request = self.request(prompt, salt, pinned_rank)
        choice = self.balancer.choose(request, self.ledger.rank_ids, now=0.0)
        self.last_handle += 1
        num_new, new_keys = request.new_on(choice.rank_id)
        self.ledger.book(self.last_handle, choice.rank_id, num_new, new_keys)
        self.ledger.on_sent(self.last_handle, self.last_handle)
        return self.last_handle, choice.rank_id, num_new

    def compute(self, handle: int, prompt: list[int], seq: int = 0) -> None:
        """The rank has stored the prompt's blocks and has nothing to do."""
        rank_id = self.ledger.rank_of(handle)
        assert rank_id is not None
        assert self.ledger.prefix_index is not None
        stored = array("Q", prefix_keys(prompt, BLOCK_SIZE))
        assert self.ledger.prefix_index.on_events(CacheEvents(rank_id, seq, seq == 0, stored, stored[:0]))
        self.ledger.on_report(rank_id, handle, handle, RankLoad(), now=0.0)
        self.ledger.release(handle)


def test_second_turn_follows_the_first_and_books_only_what_is_new() -> None:
    group, history = Group(4), list(range(1000))
    handle, first, _ = group.send(history)
    group.compute(handle, history)
    _, second, num_new = group.send([*history, *range(50)])
    assert second == first
    assert num_new == 1050 - 15 * TOKENS_PER_KEY
    assert group.ledger.num_unreported_tokens == num_new
    group.ledger.check_invariants()


def test_burst_of_equal_prompts_meets_before_anything_is_computed() -> None:
    """As do the n sequences of one request."""
    group, prompt = Group(4), list(range(1000))
    assert len({group.send(prompt)[1] for _ in range(8)}) == 1
    assert group.ledger.num_unreported_tokens == 1000 + 7 * (1000 - 15 * TOKENS_PER_KEY)


def test_burst_of_different_prompts_spreads() -> None:
    group = Group(4)
    counts = Counter(group.send(list(range(1000 * i, 1000 * i + 1000)))[1].rank for i in range(1, 13))
    assert counts == {0: 3, 1: 3, 2: 3, 3: 3}


def test_one_hot_prompt_does_not_drown_its_rank() -> None:
    """Ten thousand equal prompts in flight: each costs its rank a place and its last tokens, until another is quicker."""
    group, prompt = Group(4), list(range(400))
    counts = Counter(group.send(prompt)[1].rank for _ in range(2000))
    assert min(counts[rank] for rank in range(4)) > 400


# Seen in a simulation: one system prompt for all gathered its requests on three of eight ranks, at three times the latency.
def test_prompt_that_all_share_crowds_no_rank() -> None:
    group, prompt = Group(4), list(range(4000))
    counts = Counter(group.send(prompt)[1].rank for _ in range(80))
    assert sorted(counts) == [0, 1, 2, 3]
    assert max(counts.values()) <= CROWD_FACTOR * min(counts.values()) + CROWD_SLACK + 1


def test_rank_that_has_just_started_does_not_draw_all_chats_from_theirs() -> None:
    new, home = make_view(0, num_prefill_tokens=8000), make_view(1, num_running=100, own_in_flight=100)
    assert choose(new, home, num_prompt_tokens=6000, cached={1: 5000}).rank_id.rank == 1
    new = make_view(0)  # now it could begin at once
    assert choose(new, home, num_prompt_tokens=6000, cached={1: 5000}).rank_id.rank == 0


def test_prompt_with_another_salt_sees_nothing() -> None:
    group, prompt = Group(2), list(range(1000))
    group.send(prompt, salt="a")
    _, _, num_new = group.send(prompt, salt="b")
    assert num_new == 1000


def test_pinned_request_is_booked_by_what_it_will_compute() -> None:
    group, prompt = Group(2), list(range(1000))
    sent = [group.send(prompt, pinned_rank=1)[1:] for _ in range(2)]
    assert sent == [(RankId(1, 1), 1000), (RankId(1, 1), 40)]


def test_after_a_restart_nobody_counts_on_the_old_cache() -> None:
    group, history = Group(2), list(range(1000))
    handle, first, _ = group.send(history)
    group.compute(handle, history)
    group.ledger.remove_rank(first)
    group.begin_life(RankId(first.rank, 2))
    _, _, num_new = group.send([*history, *range(50)])
    assert num_new == 1050


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_releases_leave_no_expectation(how: str) -> None:
    group = Group(2)
    handle, _, _ = group.send(list(range(1000)))
    group.ledger.release(handle, abort_seq=99 if how == "abort" else None)
    assert group.ledger.prefix_index is not None
    assert group.ledger.prefix_index.num_blocks == 0

"""What any policy must do, whatever it goes by; and bursts, which meet balancers at their worst."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.ledger import LoadLedger
from balancer.load import RankView
from balancer.load_balancer import LoadBalancer
from balancer.policies import POLICIES, make_policy
from balancer.testing import make_request, make_view
from cores.messages import RankId, RankLoad

LOAD_AWARE = ["least_tokens", "prefix_affinity", "session_affinity", "least_requests", "vllm"]
EVEN = [*LOAD_AWARE, "round_robin"]


def make_balancer(policy: str, num_ranks: int, seed: int = 7) -> LoadBalancer:
    ledger = LoadLedger()
    for rank in range(num_ranks):
        ledger.add_rank(RankId(rank, 1), max_num_batched_tokens=8192, max_num_seqs=256)
    return LoadBalancer(make_policy(policy, random.Random(seed)), ledger)


def dispatch(balancer: LoadBalancer, handles: range, num_prompt_tokens: int = 100, now: float = 0.0) -> Counter[int]:
    """Sends a burst: nothing is heard of any rank in between."""
    counts: Counter[int] = Counter()
    for handle in handles:
        request = make_request(num_prompt_tokens)
        rank_id = balancer.choose(request, balancer.ledger.rank_ids, now).rank_id
        balancer.ledger.book(handle, rank_id, request.num_prompt_tokens)
        balancer.ledger.on_sent(handle, handle)
        counts[rank_id.rank] += 1
    return counts


views = st.builds(
    make_view,
    num_waiting=st.integers(0, 500),
    num_running=st.integers(0, 256),
    num_prefill_tokens=st.integers(0, 1_000_000),
    num_decodes=st.integers(0, 256),
    kv_cache_usage=st.floats(0, 1),
    step_ms=st.floats(0, 1000),
    prefill_tokens_per_s=st.floats(0, 1e6),
    own_in_flight=st.integers(0, 500),
    reported_at=st.none() | st.floats(-1e4, 0),
)


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), num_prompt_tokens=st.integers(0, 1_000_000))
def test_choice_is_always_one_of_the_ranks(name: str, data: st.DataObject, num_prompt_tokens: int) -> None:
    policy = make_policy(name, random.Random(3))
    for _ in range(3):  # the set of eligible ranks changes from one request to the next
        ranks = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
        seen = [_with_rank(data.draw(views), rank) for rank in sorted(ranks)]
        assert policy.choose(make_request(num_prompt_tokens), seen, now=0.0).rank_id in [view.rank_id for view in seen]


def _with_rank(view: RankView, rank: int) -> RankView:
    return dataclasses.replace(view, rank_id=RankId(rank, 1))


@pytest.mark.parametrize("name", POLICIES)
def test_same_seed_chooses_the_same(name: str) -> None:
    ranks = [make_view(rank) for rank in range(5)]
    first, second = (make_policy(name, random.Random(11)) for _ in range(2))
    for _ in range(20):
        assert first.choose(make_request(), ranks, 0.0) == second.choose(make_request(), ranks, 0.0)


@pytest.mark.parametrize("name", POLICIES)
def test_no_rank_of_an_idle_group_is_starved(name: str) -> None:
    ranks = [make_view(rank) for rank in range(8)]
    policy = make_policy(name, random.Random(5))
    counts = Counter(policy.choose(make_request(), ranks, 0.0).rank_id.rank for _ in range(2000))
    assert min(counts[rank] for rank in range(8)) > 150


# Seen in the field: the whole first burst after the start went to rank 0.
@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_first_burst_before_any_report_spreads_evenly(name: str, num_ranks: int) -> None:
    counts = dispatch(make_balancer(name, num_ranks), range(1, 10 * num_ranks + 1))
    assert [counts[rank] for rank in range(num_ranks)] == [10] * num_ranks


# Seen in the field: a fixed tie-break sends 6 of 10 to one of two idle ranks.
@pytest.mark.parametrize("name", EVEN)
def test_ties_split_five_to_five(name: str) -> None:
    counts = dispatch(make_balancer(name, 2), range(1, 11))
    assert counts == {0: 5, 1: 5}


@pytest.mark.parametrize("name", LOAD_AWARE)
def test_two_equal_ranks_behind_dearer_ones_share_alike(name: str) -> None:
    busy = {"num_waiting": 50, "num_running": 50, "num_prefill_tokens": 50_000}
    ranks = [make_view(0, **busy), make_view(1, **busy), make_view(2), make_view(3)]
    policy = make_policy(name, random.Random(5))
    assert Counter(policy.choose(make_request(), ranks, 0.0).rank_id.rank for _ in range(20)) == {2: 10, 3: 10}


# Seen in the field: a report made before a burst arrives in the middle of it and wipes out what was booked.
@pytest.mark.parametrize("name", LOAD_AWARE)
def test_old_snapshots_in_the_middle_of_a_burst_do_not_tilt_it(name: str) -> None:
    balancer = make_balancer(name, 2)
    counts = dispatch(balancer, range(1, 41))
    for _ in range(10):
        balancer.ledger.on_report(RankId(0, 1), step=1, command_seq=0, load=RankLoad(), now=0.05)  # rank 0 looks idle again
        counts += dispatch(balancer, range(balancer.ledger.num_in_flight + 1, balancer.ledger.num_in_flight + 5), now=0.05)
    assert counts == {0: 40, 1: 40}


# Seen in the field: a request counted as load only when its answer begins, so long prompts with short answers all met on one.
@pytest.mark.parametrize("name", LOAD_AWARE)
def test_long_prompts_with_one_token_answers_count_from_their_dispatch(name: str) -> None:
    counts = dispatch(make_balancer(name, 4), range(1, 21), num_prompt_tokens=32_768)
    assert counts == {0: 5, 1: 5, 2: 5, 3: 5}


# Seen in the field: each client that leaves leaks one count, and the rank with the fewest leaks gets everything.
@pytest.mark.parametrize("name", LOAD_AWARE)
def test_clients_that_leave_do_not_tilt_the_balance(name: str) -> None:
    balancer = make_balancer(name, 2)
    seqs = {0: 0, 1: 0}
    for handle in range(1, 401):  # all pinned to rank 0, and gone before they were served
        balancer.ledger.book(handle, RankId(0, 1), 500)
        seqs[0] += 2
        balancer.ledger.on_sent(handle, seqs[0] - 1)
        balancer.ledger.release(handle, abort_seq=seqs[0])
    counts: Counter[int] = Counter()
    for handle in range(401, 421):
        rank_id = balancer.choose(make_request(), balancer.ledger.rank_ids, now=0.0).rank_id
        balancer.ledger.book(handle, rank_id, 100)
        counts[rank_id.rank] += 1
    assert counts == {0: 10, 1: 10}


@pytest.mark.parametrize("name", EVEN)
def test_hundred_short_requests_that_come_and_go_use_both_ranks(name: str) -> None:
    """Prompts and answers of different length, measured rates that differ by noise: each rank still gets its third."""
    balancer, rng = make_balancer(name, 2), random.Random(1)
    counts: Counter[int] = Counter()
    step = 0
    for handle in range(1, 101):
        counts += dispatch(balancer, range(handle, handle + 1), num_prompt_tokens=rng.randrange(20, 200))
        for rank_id in balancer.ledger.rank_ids:
            held = balancer.ledger.handles_on(rank_id)
            if len(held) > 5 and rng.random() < 0.5:
                balancer.ledger.release(held.pop(rng.randrange(len(held))))
                step += 1
                load = RankLoad(num_running=len(held), num_decodes=len(held), prefill_tokens_per_s=rng.uniform(8e3, 1e4))
                balancer.ledger.on_report(rank_id, step, command_seq=handle, load=load, now=0.0)
    assert min(counts[0], counts[1]) >= 34
    balancer.ledger.check_invariants()

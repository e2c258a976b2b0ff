from __future__ import annotations

import random

import pytest

from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer, NoRankAvailableError, UnknownRankError
from balancer.policies import POLICIES, make_policy
from balancer.testing import make_request
from cores.messages import RankId

RANKS = [RankId(rank, 1) for rank in range(4)]


def make_balancer(policy: str = "round_robin", ranks: list[RankId] = RANKS) -> LoadBalancer:
    ledger = LoadLedger()
    for rank_id in ranks:
        ledger.add_rank(rank_id, max_num_batched_tokens=8192, max_num_seqs=256)
    return LoadBalancer(make_policy(policy, random.Random(7)), ledger)


def test_policy_sees_only_eligible_ranks_in_order() -> None:
    balancer = make_balancer()
    chosen = {balancer.choose(make_request(), {RANKS[2], RANKS[0]}, now=0.0).rank_id for _ in range(10)}
    assert chosen == {RANKS[0], RANKS[2]}


def test_pinned_rank_bypasses_the_policy_and_its_rotation() -> None:
    balancer, undisturbed = make_balancer(), make_balancer()
    for _ in range(8):
        choice = balancer.choose(make_request(pinned_rank=1), RANKS, now=0.0)
        assert (choice.rank_id, choice.reason) == (RANKS[1], "pinned")
        assert balancer.choose(make_request(), RANKS, 0.0) == undisturbed.choose(make_request(), RANKS, 0.0)


def test_pin_follows_the_rank_into_its_next_life() -> None:
    balancer = make_balancer(ranks=[RankId(0, 1), RankId(1, 2)])
    assert balancer.choose(make_request(pinned_rank=1), balancer.ledger.rank_ids, now=0.0).rank_id == RankId(1, 2)


@pytest.mark.parametrize("pinned_rank", [4, -1, 1_000_000])
def test_pin_to_a_rank_that_does_not_exist_names_those_that_do(pinned_rank: int) -> None:
    with pytest.raises(UnknownRankError, match=f"rank {pinned_rank} does not exist; the ranks here are 0 to 3$"):
        make_balancer().choose(make_request(pinned_rank=pinned_rank), RANKS, now=0.0)


def test_ranks_with_gaps_are_listed_as_they_are() -> None:
    ranks = [RankId(rank, 1) for rank in (0, 1, 2, 5)]
    with pytest.raises(UnknownRankError, match=r"0 to 2, 5$"):
        make_balancer(ranks=ranks).choose(make_request(pinned_rank=4), ranks, now=0.0)


def test_pin_to_a_rank_that_an_operator_has_removed_names_those_that_are_left() -> None:
    balancer = make_balancer()
    balancer.ledger.remove_rank(RANKS[3], for_good=True)
    with pytest.raises(UnknownRankError, match=r"rank 3 does not exist; the ranks here are 0 to 2$"):
        balancer.choose(make_request(pinned_rank=3), RANKS[:3], now=0.0)


def test_pin_to_a_dead_rank_is_unavailable_and_not_unknown() -> None:
    balancer = make_balancer()
    balancer.ledger.remove_rank(RANKS[3])
    with pytest.raises(NoRankAvailableError, match="rank 3 is not ready"):
        balancer.choose(make_request(pinned_rank=3), RANKS[:3], now=0.0)


def test_nobody_eligible_is_unavailable() -> None:
    with pytest.raises(NoRankAvailableError):
        make_balancer().choose(make_request(), [], now=0.0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_made_by_its_name(name: str) -> None:
    assert make_policy(name, random.Random(1)).name == name


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown load balancing policy 'fastest'; one of least_tokens, "):
        make_policy("fastest", random.Random(1))

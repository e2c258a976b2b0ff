from __future__ import annotations

import random
from collections import Counter

from balancer.load import RankView
from balancer.policies.session_affinity import MAX_LEAD, SessionAffinity
from balancer.testing import make_request, make_view


def home_of(session: str | None, *ranks: RankView, seed: int = 7) -> int:
    request = make_request(100, session_id=session)
    return SessionAffinity(random.Random(seed)).choose(request, ranks, now=0.0).rank_id.rank


def test_session_keeps_its_rank_on_every_front_end_and_over_restarts() -> None:
    for session in map(str, range(50)):
        homes = {home_of(session, *(make_view(r, epoch=epoch) for r in range(4)), seed=epoch) for epoch in range(1, 5)}
        assert len(homes) == 1


def test_sessions_spread_evenly() -> None:
    counts = Counter(home_of(f"session-{i}", *(make_view(rank) for rank in range(4))) for i in range(4000))
    assert all(900 < counts[rank] < 1100 for rank in range(4))


def test_rank_that_leaves_moves_only_its_own_sessions() -> None:
    ranks = [make_view(rank) for rank in range(4)]
    before = {session: home_of(session, *ranks) for session in map(str, range(400))}
    after = {session: home_of(session, *ranks[:3]) for session in before}
    assert all(after[session] == home for session, home in before.items() if home != 3)
    assert {after[session] for session, home in before.items() if home == 3} == {0, 1, 2}


def test_session_leaves_a_rank_that_is_a_step_busier_and_comes_back() -> None:
    home = home_of("chat", make_view(0), make_view(1))
    lead = int(MAX_LEAD * 8192)
    nearly, busier = (
        [make_view(r, num_prefill_tokens=tokens if r == home else 0) for r in range(2)] for tokens in (lead, lead + 1)
    )
    assert home_of("chat", *nearly) == home
    assert home_of("chat", *busier) != home


def test_request_without_a_session_goes_to_the_least_tokens() -> None:
    assert home_of(None, make_view(0, num_prefill_tokens=500), make_view(1)) == 1

"""The whole simulation: it is deterministic, fast-forward changes nothing, and every request ends exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.dispatch_queue import LOOK_AHEAD
from balancer.simulation.contenders import contender_names, make_contender
from balancer.simulation.front_end import Reporting, SimulatedFrontEnd
from balancer.simulation.simulator import Death, RollingRestart, Simulation, SimulationConfig, SimulationResult, Slowdown
from balancer.simulation.trace import TraceRequest
from tests.balancer.simulation.workload import chats, make_config


def simulate(name: str, config: SimulationConfig, trace: Sequence[TraceRequest], seed: int = 1) -> SimulationResult:
    simulation = Simulation(config, trace, make_contender(name).make_balancer, seed)
    result = simulation.run()
    simulation.check_invariants()
    return result


def story(result: SimulationResult) -> list[tuple[Any, ...]]:
    return [(r.rank, r.first_token_s, r.last_token_s, r.num_cached_tokens, r.num_moves, r.stalls_s) for r in result.requests]


@pytest.mark.parametrize("name", contender_names())
def test_every_policy_serves_everyone_and_twice_the_same(name: str) -> None:
    trace = chats(80)
    result = simulate(name, make_config(), trace)
    assert all(request.error is None and request.first_token_s is not None for request in result.requests)
    assert story(result) == story(simulate(name, make_config(), trace))


FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "late loads": {"reporting": Reporting(delay_s=0.02, load_interval_s=0.1), "num_front_ends": 2},
    "death": {"deaths": [Death(1, 4.0, 3.0)]},
    "slow": {"slowdowns": [Slowdown(0, 2.0, 3.0), Slowdown(0, 6.0, 1.0)]},
    "rolling restart": {"rolling_restart": RollingRestart(1.0, drain_s=0.5, restart_after_s=1.0)},
    "disconnects": {"disconnect_rate": 0.3},
    "late binding": {"dispatch": "late", "num_front_ends": 2},
    "late binding and death": {"dispatch": "late", "dispatch_order": "shortest", "deaths": [Death(1, 4.0, 3.0)]},
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize(
    ("num_kv_blocks", "block_size"), [(200, 512), (16, 512), (600, 16)], ids=["cache", "small cache", "small cache and blocks"]
)
def test_fast_forward_changes_no_time_stamp(faults: dict[str, Any], num_kv_blocks: int, block_size: int) -> None:
    trace = chats(70, rate_per_s=12.0)
    cache = {"num_kv_blocks": num_kv_blocks, "block_size": block_size}
    fast, slow = (
        simulate("prefix_affinity", make_config(fast_forward=fast_forward, **cache, **faults), trace)
        for fast_forward in (True, False)
    )
    assert story(fast) == story(slow)
    assert [log.num_steps for log in fast.logs] == [log.num_steps for log in slow.logs]
    assert [log.decode_s for log in fast.logs] == [log.decode_s for log in slow.logs]


times = st.floats(0.0, 12.0, allow_nan=False)
deaths = st.builds(Death, st.integers(0, 2), times, st.none() | st.floats(0.0, 5.0))
slowdowns = st.builds(Slowdown, st.integers(0, 2), times, st.sampled_from([0.5, 1.0, 4.0]))


@given(
    deaths=st.lists(deaths, max_size=5),
    slowdowns=st.lists(slowdowns, max_size=3),
    rolling_restart=st.none() | st.builds(RollingRestart, times, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 2.0])),
    disconnect_rate=st.sampled_from([0.0, 0.2]),
    num_front_ends=st.integers(1, 3),
    dispatch=st.sampled_from(["early", "late"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_whatever_fails_every_request_ends_once_and_the_books_are_empty(
    deaths: list[Death],
    slowdowns: list[Slowdown],
    rolling_restart: RollingRestart | None,
    disconnect_rate: float,
    num_front_ends: int,
    dispatch: Literal["early", "late"],
    seed: int,
) -> None:
    config = make_config(
        deaths=deaths,
        slowdowns=slowdowns,
        rolling_restart=rolling_restart,
        disconnect_rate=disconnect_rate,
        num_front_ends=num_front_ends,
        dispatch=dispatch,
    )
    result = simulate("least_tokens", config, chats(40, seed=seed), seed)
    for request in result.requests:
        assert request.error in (None, "the client left", "no rank came back")


def test_a_dead_ranks_requests_go_on_elsewhere_from_their_last_token() -> None:
    trace = [TraceRequest(0.0, 600, 200), TraceRequest(0.0, 600, 200)]
    result = simulate("round_robin", make_config(2, deaths=[Death(0, 1.0)]), trace)
    moved = [request for request in result.requests if request.num_moves]
    assert len(moved) == 1
    (request,) = moved
    assert request.rank == 1
    assert 0 < request.num_output_tokens < 200
    (stall_s,) = request.stalls_s
    assert 0.05 < stall_s < 0.2  # noticed, and computed again


def test_requests_wait_for_a_rank_where_none_is_left() -> None:
    result = simulate("least_tokens", make_config(1, deaths=[Death(0, 1.0, 5.0)]), [TraceRequest(2.0, 600, 3)])
    (request,) = result.requests
    assert request.first_token_s is not None
    assert request.first_token_s > 6.0


def test_without_any_rank_they_end_with_an_error() -> None:
    result = simulate("least_tokens", make_config(1, deaths=[Death(0, 1.0)]), [TraceRequest(2.0, 600, 3)])
    assert result.requests[0].error == "no rank came back"


def test_a_rolling_restart_fails_nothing_and_restarts_every_rank() -> None:
    config = make_config(3, rolling_restart=RollingRestart(1.0, drain_s=5.0, restart_after_s=0.5))
    simulation = Simulation(config, chats(150), make_contender("least_tokens").make_balancer, 1)
    result = simulation.run()
    simulation.check_invariants()
    assert all(request.error is None for request in result.requests)
    assert simulation.front_ends[0].ledger.rank_ids == [(0, 2), (1, 2), (2, 2)]


def test_a_slow_rank_gets_less_work() -> None:
    trace = chats(200, rate_per_s=4.0)
    result = simulate("least_tokens", make_config(3, slowdowns=[Slowdown(0, 0.0, 3.0)]), trace)
    served = [sum(request.rank == rank for request in result.requests) for rank in range(3)]
    assert served[0] < min(served[1:])


class WatchedSimulation(Simulation):
    """Looks after every pass of a queue whether a rank is idle that one in it should have gone to."""

    num_looks = 0

    def _wake_later(self, front_end: SimulatedFrontEnd) -> None:
        super()._wake_later(front_end)
        for request in front_end.queued[:LOOK_AHEAD]:
            choice = front_end.balancer.choose(front_end.routing(request), self._eligible, 0.0)
            assert front_end.ledger.view(choice.rank_id).num_requests > 0
            self.num_looks += 1


def test_no_rank_is_idle_while_one_waits_for_it() -> None:
    config = make_config(3, dispatch="late", num_kv_blocks=200)
    simulation = WatchedSimulation(config, chats(150, rate_per_s=60.0), make_contender("prefix_affinity").make_balancer, 1)
    simulation.run()
    simulation.check_invariants()
    assert simulation.num_looks > 100


def test_a_queue_without_ranks_keeps_its_requests_until_one_is_back() -> None:
    config = make_config(1, dispatch="late", deaths=[Death(0, 1.0, 5.0)])
    (request,) = simulate("least_tokens", config, [TraceRequest(2.0, 600, 3)]).requests
    assert request.first_token_s is not None
    assert request.first_token_s > 6.0


def test_an_idle_rank_is_not_forgotten() -> None:
    first = TraceRequest(0.0, 4000, 5, tuple(range(8)))
    trace = [first, *(TraceRequest(20.0 * i, 4000, 5, first.hash_ids) for i in range(1, 8))]
    requests = simulate("prefix_affinity", make_config(8), trace).requests
    assert {request.rank for request in requests} == {requests[0].rank}
    assert all(request.num_cached_tokens == 7 * 512 for request in requests[1:])

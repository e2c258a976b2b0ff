from __future__ import annotations

from collections.abc import Callable

import pytest

from balancer.rank_health import InvalidTransitionError, RankHealth, RankState
from cores.messages import EngineState, RankId

S = RankState
E = EngineState


def make_health(*events: Callable[[RankHealth], object]) -> RankHealth:
    health = RankHealth(RankId(0, 1), now=0.0, heartbeat_timeout_s=3.0, stall_timeout_s=60.0)
    for event in events:
        event(health)
        health.check_invariants()
    return health


def ready(health: RankHealth) -> None:
    health.on_ready(0.0)


def dead(health: RankHealth) -> None:
    health.on_dead(0.0, "killed")


def silent(health: RankHealth) -> None:
    health.on_timer(3.0)


def stuck(health: RankHealth) -> None:
    """Alive with work for 60 s, and no step in that time."""
    for tick in range(61):
        health.on_sign_of_life(float(tick), step=7, has_work=True)
    health.on_timer(60.0)


def told(state: str) -> Callable[[RankHealth], None]:
    return lambda health: health.on_launcher_state(state, 0.0)


def says(state: EngineState) -> Callable[[RankHealth], None]:
    return lambda health: health.on_engine_state(state, 0.0)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), S.STARTING),
        ((ready,), S.READY),
        ((dead,), S.DEAD),
        ((told("starting"),), S.STARTING),
        ((told("ready"),), S.STARTING),  # ready for the launcher; we have not heard from it
        ((told("ready"), ready), S.READY),
        ((told("draining"), ready), S.DRAINING),  # the launcher was faster than the engine's word to us
        ((told("dead"),), S.DEAD),
        ((told("restarting"),), S.RESTARTING),
        ((told("restarting"), told("restarting")), S.RESTARTING),
        ((told("restarting"), told("ready")), S.RESTARTING),
        ((told("restarting"), told("dead")), S.DEAD),
        ((told("restarting"), dead), S.DEAD),
        ((told("restarting"), ready), S.READY),
        ((ready, told("starting")), S.READY),  # old news
        ((ready, told("restarting")), S.READY),
        ((ready, told("ready")), S.READY),
        ((ready, told("draining")), S.DRAINING),
        ((ready, told("draining"), told("ready")), S.READY),
        ((ready, told("paused")), S.PAUSED),
        ((ready, told("sleeping")), S.SLEEPING),
        ((ready, told("dead")), S.DEAD),
        ((ready, dead), S.DEAD),
        ((ready, dead, dead), S.DEAD),
        ((ready, dead, told("ready")), S.DEAD),  # the launcher does not know yet
        ((ready, dead, told("starting")), S.DEAD),
        ((ready, dead, told("restarting")), S.DEAD),
        ((ready, dead, told("dead")), S.DEAD),
        ((dead, ready), S.DEAD),
        ((ready, silent), S.SUSPECT),
        ((ready, silent, told("draining")), S.SUSPECT),
        ((ready, silent, dead), S.DEAD),
        ((ready, stuck), S.STALLED),
        ((ready, stuck, dead), S.DEAD),
        ((ready, told("draining"), stuck), S.STALLED),
        ((ready, told("paused"), stuck), S.PAUSED),  # meant to stand still
        ((ready, says(E.PAUSED)), S.PAUSED),
        ((ready, says(E.SLEEPING)), S.SLEEPING),
        ((ready, says(E.DRAINING)), S.DRAINING),
        ((ready, says(E.PAUSED), says(E.READY)), S.READY),
        ((ready, says(E.PAUSED), told("ready")), S.PAUSED),  # the launcher knows nothing of it
        ((ready, told("draining"), says(E.PAUSED)), S.PAUSED),
        ((ready, told("draining"), says(E.READY)), S.DRAINING),
        ((says(E.PAUSED), ready), S.PAUSED),
        ((ready, says(E.PAUSED), stuck), S.PAUSED),
        ((ready, says(E.DRAINING), stuck), S.STALLED),
        ((ready, says(E.PAUSED), silent), S.SUSPECT),
        ((ready, says(E.PAUSED), dead), S.DEAD),
        ((silent,), S.STARTING),  # how long a start may take is the launcher's affair
    ],
    ids=lambda value: " ".join(getattr(e, "__name__", "?") for e in value) if isinstance(value, tuple) else str(value),
)
def test_state_after_events(events: tuple[Callable[[RankHealth], object], ...], state: RankState) -> None:
    health = make_health(*events)
    assert health.state is state
    assert health.is_eligible is (state is S.READY)
    assert health.is_serving is (state not in (S.STARTING, S.DEAD, S.RESTARTING))


def test_suspect_comes_back_at_the_next_sign_of_life() -> None:
    health = make_health(ready)
    assert health.on_timer(2.9) is None
    assert health.on_timer(3.0) is S.SUSPECT
    assert health.on_timer(4.0) is None  # said once
    health.on_sign_of_life(4.5, step=0, has_work=False)
    assert health.is_eligible
    assert health.on_timer(5.0) is None


def test_a_rank_that_is_called_ready_and_says_no_word_to_us_is_doubted_like_one_that_serves() -> None:
    health = make_health()
    health.on_launcher_state("starting", 10.0)
    assert health.on_timer(100.0) is None
    for now in (100.0, 102.0):  # a snapshot repeats the last one
        health.on_launcher_state("ready", now)
    assert health.on_timer(102.9) is None
    assert health.on_timer(103.0) is S.SUSPECT
    health.on_launcher_state("ready", 104.0)
    assert health.state is S.SUSPECT
    assert health.on_timer(160.0) is S.STALLED
    health.check_invariants()
    assert not health.is_serving
    health.on_first_word(161.0)
    assert health.state is S.STARTING
    assert health.on_timer(900.0) is None  # it is being prepared, which may take its time
    health.on_ready(901.0)
    assert health.is_eligible
    health.check_invariants()


def test_a_rank_in_doubt_that_never_said_a_word_may_die() -> None:
    health = make_health(told("restarting"), told("ready"), silent, told("dead"))
    assert health.state is S.DEAD


def test_suspect_that_was_draining_goes_on_draining() -> None:
    health = make_health(ready, told("draining"), silent)
    health.on_sign_of_life(4.0, step=1, has_work=False)
    assert health.state is S.DRAINING


def test_stalled_needs_progress_and_not_only_a_heartbeat() -> None:
    health = make_health(ready, stuck)
    health.on_sign_of_life(61.0, step=7, has_work=True)
    assert health.state is S.STALLED
    health.on_sign_of_life(62.0, step=8, has_work=True)
    assert health.state is S.READY


def test_stalled_rank_that_falls_silent_stays_stalled_and_speaking_alone_does_not_help() -> None:
    health = make_health(ready, stuck)
    assert health.state is S.STALLED
    assert health.on_timer(70.0) is None
    health.on_sign_of_life(71.0, step=7, has_work=True)
    assert health.state is S.STALLED  # never back in rotation for the moment between two timers


def test_silent_rank_is_suspect_first_and_stalled_once_its_work_has_waited_too_long() -> None:
    health = make_health(ready)
    health.on_sign_of_life(1.0, step=7, has_work=True)
    assert health.on_timer(5.0) is S.SUSPECT
    assert health.on_timer(60.0) is None
    assert health.on_timer(61.0) is S.STALLED


def test_silent_idle_rank_is_stalled_only_if_we_wait_for_it() -> None:
    health = make_health(ready)
    health.on_sign_of_life(1.0, step=7, has_work=False)
    assert health.on_timer(61.0) is S.SUSPECT
    assert health.on_timer(62.0) is None
    assert health.on_timer(63.0, has_own_work=True) is S.STALLED


def test_idle_rank_never_stalls_and_its_clock_starts_with_the_work() -> None:
    health = make_health(ready)
    for tick in range(200):
        health.on_sign_of_life(float(tick), step=7, has_work=False)
    assert health.on_timer(199.0) is None
    health.on_sign_of_life(200.0, step=7, has_work=True)
    assert health.on_timer(202.0) is None
    assert health.last_progress_s(202.0) == 3.0


def test_late_frame_of_an_older_step_is_no_progress() -> None:
    health = make_health(ready)
    health.on_sign_of_life(1.0, step=9, has_work=True)
    health.on_sign_of_life(2.0, step=8, has_work=True)
    assert health.last_progress_s(2.0) == 1.0
    assert health.last_seen_s(2.0) == 0.0


@pytest.mark.parametrize(
    ("stand_still", "go_on"),
    [
        (lambda h, now: h.on_launcher_state("paused", now), lambda h, now: h.on_launcher_state("ready", now)),
        (lambda h, now: h.on_engine_state(E.SLEEPING, now), lambda h, now: h.on_engine_state(E.READY, now)),
    ],
    ids=["told by the launcher", "said by the engine"],
)
def test_pause_is_not_counted_as_a_stall_after_it_ends(
    stand_still: Callable[[RankHealth, float], None], go_on: Callable[[RankHealth, float], None]
) -> None:
    health = make_health(ready)
    health.on_sign_of_life(0.0, step=1, has_work=True)
    stand_still(health, 10.0)
    health.on_sign_of_life(100.0, step=1, has_work=True)
    go_on(health, 101.0)
    health.on_sign_of_life(102.0, step=1, has_work=True)
    assert health.on_timer(102.0) is None
    assert health.last_progress_s(102.0) == 1.0


def test_first_proof_of_death_counts() -> None:
    health = make_health(ready)
    health.on_dead(1.0, "out of memory")
    health.on_dead(2.0, "process exited with code 1")
    health.on_sign_of_life(3.0, step=99, has_work=True)
    assert (health.state, health.cause) == (S.DEAD, "out of memory")
    assert health.on_timer(100.0) is None


def test_impossible_event_raises_with_state_event_and_history() -> None:
    health = make_health(ready)
    with pytest.raises(
        InvalidTransitionError, match=r"rank 0 \(epoch 1\): engine ready cannot happen in state ready; .*created"
    ):
        health.on_ready(1.0)


def test_unknown_word_of_the_launcher_is_named() -> None:
    with pytest.raises(ValueError, match="unknown launcher state 'zombie'; one of starting, ready"):
        make_health(told("zombie"))


def test_history_is_bounded_and_tells_what_happened() -> None:
    health = make_health(ready)
    for round_ in range(100):
        health.on_timer(10.0 * round_ + 9)
        health.on_sign_of_life(10.0 * round_ + 10, step=round_, has_work=False)
    health.check_invariants()
    assert [(e.event, e.state) for e in health.history][-2:] == [("silent for 9.0 s", S.SUSPECT), ("sign of life", S.READY)]

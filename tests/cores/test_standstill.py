"""Why an engine stands still, and when it does not any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cores.messages import EngineState
from cores.standstill import Standstill
from cores.utilities import OperationRefusedError

ALL = frozenset({"weights", "kv_cache"})


@pytest.fixture
def standstill() -> Iterator[Standstill]:
    standstill = Standstill()
    yield standstill
    standstill.check_invariants()


def test_a_new_engine_serves(standstill: Standstill) -> None:
    assert (standstill.state, standstill.is_closed, standstill.is_frozen) == (EngineState.READY, False, False)


def test_draining_is_closed_and_not_frozen(standstill: Standstill) -> None:
    drain = standstill.begin_drain()
    assert (standstill.state, standstill.is_closed, standstill.is_frozen) == (EngineState.DRAINING, True, False)
    standstill.check_drain(drain)
    standstill.end_drain(drain)
    assert standstill.state is EngineState.READY


def test_resume_calls_off_a_drain(standstill: Standstill) -> None:
    drain = standstill.begin_drain()
    standstill.resume()
    assert standstill.state is EngineState.READY
    with pytest.raises(OperationRefusedError, match="called off"):
        standstill.check_drain(drain)


def test_two_drains_end_apart(standstill: Standstill) -> None:
    first, second = standstill.begin_drain(), standstill.begin_drain()
    standstill.end_drain(first)
    standstill.check_drain(second)
    assert standstill.state is EngineState.DRAINING


def test_it_wakes_up_when_all_its_memory_is_back(standstill: Standstill) -> None:
    standstill.fall_asleep()
    assert (standstill.state, standstill.is_frozen) == (EngineState.SLEEPING, True)
    standstill.wake_up(standstill.asleep_among(["weights"]))
    assert standstill.state is EngineState.SLEEPING
    assert (standstill.sleeps("weights"), standstill.sleeps("kv_cache")) == (False, True)
    assert standstill.asleep_among(None) == {"kv_cache"}
    assert standstill.asleep_among(["weights"]) == frozenset()
    standstill.wake_up(standstill.asleep_among(None))
    assert standstill.state is EngineState.READY


def test_sleep_leaves_a_pause_as_it_was(standstill: Standstill) -> None:
    standstill.pause()
    standstill.fall_asleep()
    assert standstill.state is EngineState.SLEEPING
    standstill.wake_up(ALL)
    assert standstill.state is EngineState.PAUSED
    standstill.resume()
    assert standstill.state is EngineState.READY


def test_a_sleeping_engine_cannot_be_resumed(standstill: Standstill) -> None:
    standstill.fall_asleep()
    with pytest.raises(OperationRefusedError, match=r"it sleeps \(kv_cache, weights\); wake it up"):
        standstill.resume()


def test_an_unknown_tag_is_named_with_those_that_exist(standstill: Standstill) -> None:
    with pytest.raises(OperationRefusedError, match="tags must be of weights, kv_cache, got 'kv'"):
        standstill.asleep_among(["weights", "kv"])

"""How long a coordinator that dies is waited for. That it is restarted at all, an end-to-end test shows."""

from __future__ import annotations

import itertools

from gateway.launch.coordinator_process import FIRST_BACKOFF_S, LONG_LIFE_S, MAX_BACKOFF_S, next_backoff


def test_the_wait_doubles_up_to_a_bound_while_it_dies_soon() -> None:
    waits = list(itertools.accumulate(range(7), lambda backoff_s, _: next_backoff(backoff_s, 0.1), initial=0.0))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_the_death_after_a_long_life_is_the_first_again() -> None:
    assert next_backoff(MAX_BACKOFF_S, LONG_LIFE_S) == FIRST_BACKOFF_S

"""How often, and how soon."""

from __future__ import annotations

from gateway.launch.restart_budget import WINDOW_S, RestartBudget


def test_each_restart_waits_twice_as_long_until_none_is_left() -> None:
    budget = RestartBudget(3, first_delay_s=0.5)
    assert [budget.take(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, None]
    budget.check_invariants()


def test_a_restart_is_forgotten_after_ten_minutes_and_a_refusal_costs_nothing() -> None:
    budget = RestartBudget(2, first_delay_s=1.0)
    assert (budget.take(0.0), budget.take(100.0)) == (1.0, 2.0)
    assert budget.take(WINDOW_S - 1) is None
    assert budget.take(WINDOW_S) == 2.0  # that of 100.0 is still remembered
    assert budget.take(3 * WINDOW_S) == 1.0
    budget.check_invariants()


def test_a_budget_of_nothing() -> None:
    assert RestartBudget(0, first_delay_s=1.0).take(0.0) is None


def test_a_rank_that_has_died_often_still_comes_back_soon() -> None:
    budget = RestartBudget(max_restarts=100_000, first_delay_s=1.0)
    delays = [budget.take(now=float(i)) for i in range(3000)]
    assert delays[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(delays[5:]) == {30.0}
    budget.check_invariants()


def test_what_is_free_is_not_counted_but_where_nothing_may_begin_again_nothing_is_free() -> None:
    budget = RestartBudget(1, first_delay_s=1.0)
    assert [budget.take_free() for _ in range(100)] == [1.0] * 100
    assert (budget.take(0.0), budget.take(1.0)) == (1.0, None)
    assert budget.take_free() == 1.0
    assert RestartBudget(0, first_delay_s=1.0).take_free() is None

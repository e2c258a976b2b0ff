"""Calls by name: only what is marked, errors go to the caller, and late answers to whoever still waits."""

from __future__ import annotations

from typing import Any

from cores.config import ConfigError
from cores.messages import RankId, UtilityCall, UtilityResult
from cores.utilities import NOT_YET, Later, OperationRefusedError, Utilities, utility

RANK = RankId(2, 1)


class Owner:
    def __init__(self) -> None:
        self.answer: Any = NOT_YET

    @utility
    def add(self, a: int, b: int = 10) -> int:
        return a + b

    @utility
    def refuse(self, kind: str) -> None:
        raise {"refused": OperationRefusedError, "config": ConfigError, "broken": RuntimeError}[kind]("no")

    @utility
    def later(self) -> Later:
        return Later(self._poll)

    def _poll(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def secret(self) -> None:
        raise AssertionError("not marked")

    @property
    def expensive(self) -> None:
        raise AssertionError("looking for utilities must not run properties")


def call(utilities: Utilities, method: str, *args: Any, client: int = 0, call_id: int = 7) -> UtilityResult | None:
    return utilities.call(client, UtilityCall(1, call_id, method, args))


def test_a_marked_method_of_any_owner_runs_by_name_with_its_arguments() -> None:
    utilities = Utilities(RANK, object(), Owner())
    assert call(utilities, "add", 1) == UtilityResult(RANK, 7, 11)
    assert call(utilities, "add", 1, 2) == UtilityResult(RANK, 7, 3)


def test_what_is_not_marked_does_not_exist() -> None:
    for method in ("secret", "expensive", "__init__", "_poll", "nonsense"):
        result = call(Utilities(RANK, Owner()), method)
        assert result is not None
        assert result.error == f"unknown utility {method!r}; there are add, later, refuse"


def test_a_refusal_is_told_as_it_is_and_a_failure_with_its_type() -> None:
    utilities = Utilities(RANK, Owner())
    assert call(utilities, "refuse", "refused") == UtilityResult(RANK, 7, error="no", is_refusal=True)
    assert call(utilities, "refuse", "config") == UtilityResult(RANK, 7, error="no", is_refusal=True)
    assert call(utilities, "refuse", "broken") == UtilityResult(RANK, 7, error="RuntimeError: no")
    wrong_arguments = call(utilities, "add")
    assert wrong_arguments is not None
    assert wrong_arguments.error is not None
    assert wrong_arguments.error.startswith("TypeError: ")


def test_a_late_answer_comes_once_to_the_one_that_asked() -> None:
    owner = Owner()
    utilities = Utilities(RANK, owner)
    assert call(utilities, "later", client=3, call_id=8) is None
    assert utilities.take_late_results() == []
    owner.answer = None
    assert utilities.take_late_results() == [(3, UtilityResult(RANK, 8, None))]
    assert utilities.take_late_results() == []


def test_a_late_refusal_reaches_the_caller_too() -> None:
    owner = Owner()
    utilities = Utilities(RANK, owner)
    call(utilities, "later")
    owner.answer = OperationRefusedError("called off")
    assert utilities.take_late_results() == [(0, UtilityResult(RANK, 7, error="called off", is_refusal=True))]


def test_a_front_end_that_is_gone_gets_no_answer_but_what_it_began_is_completed() -> None:
    owner, polled = Owner(), []
    utilities = Utilities(RANK, owner)
    owner._poll = lambda: polled.append(1)  # type: ignore[method-assign]
    call(utilities, "later", client=1)
    utilities.forget_client(1)
    assert utilities.take_late_results() == []
    assert utilities.take_late_results() == []
    assert polled == [1]

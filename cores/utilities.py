"""Rare operations that front ends call by name, and the answers that are still owed. Knows none of the operations."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from cores.config import ConfigError
from cores.messages import RankId, UtilityCall, UtilityResult

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_is_utility"
NOT_YET: Final = object()


class OperationRefusedError(Exception):
    """The caller asked for something that cannot be, now or ever. The message is for the caller."""


def utility(method: F) -> F:
    """Marks a method as callable by name from a front end (`UtilityCall`)."""
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True)
class Later:
    """What a utility returns whose answer takes steps of the engine: `poll` gives `NOT_YET`, then the answer, or raises."""

    poll: Callable[[], Any]


@dataclass(slots=True)
class _Owed:
    client: int | None  # None: nobody waits any more, but what was begun is completed
    call_id: int
    method: str
    later: Later


class Utilities:
    """All marked methods of the `owners`. Names are theirs alone: the last owner of a name has it."""

    def __init__(self, rank_id: RankId, *owners: object) -> None:
        self._rank_id = rank_id
        self._methods = {name: method for owner in owners for name, method in _marked_methods(owner)}
        self._owed: list[_Owed] = []

    def call(self, client: int, call: UtilityCall) -> UtilityResult | None:
        """Runs one by name. None: its result comes later, from `take_late_results`.

        Whatever goes wrong in it goes back to the caller and is not this engine's death.
        """
        method = self._methods.get(call.method)
        if method is None:
            known = ", ".join(sorted(self._methods))
            return UtilityResult(self._rank_id, call.call_id, error=f"unknown utility {call.method!r}; there are {known}")
        result = self._result(call.call_id, call.method, lambda: method(*call.args))
        if isinstance(result.value, Later):
            self._owed.append(_Owed(client, call.call_id, call.method, result.value))
            return None
        return result

    def take_late_results(self) -> list[tuple[int, UtilityResult]]:
        """What has become due, with the front end that waits for it. To be called after every step."""
        due: list[tuple[int, UtilityResult]] = []
        for owed in self._owed.copy():
            result = self._result(owed.call_id, owed.method, owed.later.poll)
            if result.value is NOT_YET:
                continue
            self._owed.remove(owed)
            if owed.client is not None:
                due.append((owed.client, result))
        return due

    def forget_client(self, client: int) -> None:
        """That front end is gone. Its successor counts calls from 1 and must not get another's answer."""
        for owed in self._owed:
            if owed.client == client:
                owed.client = None

    def _result(self, call_id: int, name: str, function: Callable[[], Any]) -> UtilityResult:
        try:
            return UtilityResult(self._rank_id, call_id, function())
        except (OperationRefusedError, ConfigError) as error:
            logger.warning("%s: utility %s is refused: %s", self._rank_id, name, error)
            return UtilityResult(self._rank_id, call_id, error=str(error), is_refusal=True)
        except Exception as error:
            logger.exception("%s: utility %s failed", self._rank_id, name)
            return UtilityResult(self._rank_id, call_id, error=f"{type(error).__name__}: {error}")


def _marked_methods(owner: object) -> list[tuple[str, Callable[..., Any]]]:
    functions = inspect.getmembers(type(owner), inspect.isfunction)
    return [(name, getattr(owner, name)) for name, function in functions if hasattr(function, _MARK)]

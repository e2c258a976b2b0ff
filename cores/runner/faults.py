"""Scripted faults of the simulated engine, for tests of what should survive them. Says what is due; does nothing itself.

A script is a list of items separated by `;`, each `ACTION=N`, with the ranks and lives it is meant for behind it:

    die_at_step=40@rank=1@epoch=1; fail_request_at_token=7

| action                  | does                                                                                          |
| ----------------------- | --------------------------------------------------------------------------------------------- |
| die_at_step=N           | the process kills itself, as `kill -9` would, at the begin of step N (from 1; 0: while loading) |
| raise_at_step=N         | an exception instead of step N (0: while loading)                                             |
| stall_at_step=N         | step N never ends (0: loading never ends)                                                     |
| fail_request_at_token=N | the N-th token (from 1) of each request is an error of that request alone                     |
| lose_logprobs_at_token=N | the N-th token (from 1) of each request comes without the log-probabilities that it asked for |

Without `@rank=R` an item is for every rank, without `@epoch=E` for every life of it. `@seed=S` behind a token action means the
requests with this sampling seed alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cores.config import ConfigError
from cores.messages import RankId

StepFault = Literal["die", "raise", "stall"]

_STEP_ACTIONS: dict[str, StepFault] = {"die_at_step": "die", "raise_at_step": "raise", "stall_at_step": "stall"}
_ITEM = re.compile(r"(?P<action>\w+)=(?P<number>\d+)(?P<scope>(@\w+=\d+)*)")
_TOKEN_ACTIONS = ("fail_request_at_token", "lose_logprobs_at_token")
ACTIONS = (*_STEP_ACTIONS, *_TOKEN_ACTIONS)
_GRAMMAR = f"ACTION=N[@rank=R][@epoch=E] items separated by ';' (and [@seed=S] for tokens), ACTION one of {', '.join(ACTIONS)}"


@dataclass(frozen=True, slots=True)
class TokenFaults:
    """Which output tokens, by number from 1; of all requests, or of those with one sampling seed."""

    items: frozenset[tuple[int, int | None]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.items)

    def hits(self, number: int, seed: int | None) -> bool:
        return (number, None) in self.items or (number, seed) in self.items


@dataclass(frozen=True, slots=True)
class FaultScript:
    """What will go wrong in one life of one rank."""

    steps: dict[int, StepFault]
    failing_tokens: TokenFaults = TokenFaults()
    tokens_without_logprobs: TokenFaults = TokenFaults()

    @classmethod
    def parse(cls, text: str, rank_id: RankId) -> FaultScript:
        """The part of a script that is meant for `rank_id`. Raises `ConfigError` for anything outside the grammar."""
        steps: dict[int, StepFault] = {}
        tokens: dict[str, set[tuple[int, int | None]]] = {action: set() for action in _TOKEN_ACTIONS}
        for item in filter(None, (part.strip() for part in text.split(";"))):
            action, number, scope = _parse_item(item)
            if scope.get("rank", rank_id.rank) != rank_id.rank or scope.get("epoch", rank_id.epoch) != rank_id.epoch:
                continue
            if action in _STEP_ACTIONS:
                steps.setdefault(number, _STEP_ACTIONS[action])
            else:
                tokens[action].add((number, scope.get("seed")))
        return cls(steps, *(TokenFaults(frozenset(tokens[action])) for action in _TOKEN_ACTIONS))


def _parse_item(item: str) -> tuple[str, int, dict[str, int]]:
    match = _ITEM.fullmatch(item.replace(" ", ""))
    if match is None:
        raise ConfigError(f"--simulated fault takes {_GRAMMAR}; got {item!r}")
    action, number = match["action"], int(match["number"])
    scope = {key: int(value) for key, value in (pair.split("=") for pair in match["scope"].split("@")[1:])}
    allowed = {"rank", "epoch", "seed"} if action in _TOKEN_ACTIONS else {"rank", "epoch"}
    if action not in ACTIONS or scope.keys() - allowed:
        raise ConfigError(f"--simulated fault takes {_GRAMMAR}; got {item!r}")
    if action in _TOKEN_ACTIONS and number == 0:
        raise ConfigError(f"--simulated fault: tokens are counted from 1; got {item!r}")
    return action, number, scope

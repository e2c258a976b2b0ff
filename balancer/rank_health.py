"""One rank's life as one front end sees it: what the engine and the launcher said, and our doubts. Pure: `now` comes in.

Rules
-----
* The engine's own word makes it ready. A proof of death ends it; the first proof's cause stays.
* What the launcher wants of a serving rank (ready, draining, paused, sleeping) may come before the engine's word, and is kept.
* What the engine says of itself (draining, paused, sleeping) counts before that: it knows what an operator did to it.
* Doubt is ours. Silent for `heartbeat_timeout_s`: suspect, until the next sign of life. With work
  and no step for `stall_timeout_s`, silent or not: stalled. A paused or sleeping rank is meant to stand still.
* Only who serves is doubted, or owes us its first word, as the launcher calls it serving: a front end that starts again may
  find a rank that is stopped. That word is work like any other.

So the state is the doubt, if any; else the life, if it is not serving; else what the engine says, unless that is "ready"; else
what the launcher wants. A restarted rank is a new life, with the next epoch and a `RankHealth` of its own: the launcher calls
it "restarting" where the first one is "starting".
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from cores.messages import EngineState, RankId

HEARTBEAT_TIMEOUT_S = 3.0
STALL_TIMEOUT_S = 60.0
_HISTORY_LEN = 32


class RankState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    STALLED = "stalled"
    DRAINING = "draining"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    DEAD = "dead"
    RESTARTING = "restarting"


class _Life(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DEAD = "dead"
    RESTARTING = "restarting"


class _Event(StrEnum):
    READY = "engine ready"
    DIED = "proof of death"
    TOLD_STARTING = "launcher: starting"
    TOLD_SERVING = "launcher: serving"
    TOLD_DEAD = "launcher: dead"
    TOLD_RESTARTING = "launcher: restarting"


# Engine and launcher speak over different sockets, so each may be behind the other: old news moves nothing.
_TRANSITIONS: dict[tuple[_Life, _Event], _Life] = {
    (_Life.STARTING, _Event.READY): _Life.SERVING,
    (_Life.STARTING, _Event.DIED): _Life.DEAD,
    (_Life.STARTING, _Event.TOLD_STARTING): _Life.STARTING,
    (_Life.STARTING, _Event.TOLD_RESTARTING): _Life.RESTARTING,
    (_Life.STARTING, _Event.TOLD_SERVING): _Life.STARTING,  # ready for the launcher, not yet connected to us
    (_Life.STARTING, _Event.TOLD_DEAD): _Life.DEAD,
    (_Life.RESTARTING, _Event.READY): _Life.SERVING,
    (_Life.RESTARTING, _Event.DIED): _Life.DEAD,
    (_Life.RESTARTING, _Event.TOLD_RESTARTING): _Life.RESTARTING,
    (_Life.RESTARTING, _Event.TOLD_SERVING): _Life.RESTARTING,
    (_Life.RESTARTING, _Event.TOLD_DEAD): _Life.DEAD,
    (_Life.SERVING, _Event.DIED): _Life.DEAD,
    (_Life.SERVING, _Event.TOLD_STARTING): _Life.SERVING,  # its word to the launcher is still on the way
    (_Life.SERVING, _Event.TOLD_RESTARTING): _Life.SERVING,
    (_Life.SERVING, _Event.TOLD_SERVING): _Life.SERVING,
    (_Life.SERVING, _Event.TOLD_DEAD): _Life.DEAD,
    (_Life.DEAD, _Event.READY): _Life.DEAD,  # its first word, overtaken by its last
    (_Life.DEAD, _Event.DIED): _Life.DEAD,
    (_Life.DEAD, _Event.TOLD_STARTING): _Life.DEAD,  # we saw the proof before the launcher did
    (_Life.DEAD, _Event.TOLD_RESTARTING): _Life.DEAD,
    (_Life.DEAD, _Event.TOLD_SERVING): _Life.DEAD,
    (_Life.DEAD, _Event.TOLD_DEAD): _Life.DEAD,
}

# What a launcher may say of a rank, and which event that is.
_TOLD: dict[str, _Event] = {
    RankState.STARTING: _Event.TOLD_STARTING,
    RankState.READY: _Event.TOLD_SERVING,
    RankState.DRAINING: _Event.TOLD_SERVING,
    RankState.PAUSED: _Event.TOLD_SERVING,
    RankState.SLEEPING: _Event.TOLD_SERVING,
    RankState.DEAD: _Event.TOLD_DEAD,
    RankState.RESTARTING: _Event.TOLD_RESTARTING,
}
_STANDS_STILL = (RankState.PAUSED, RankState.SLEEPING)


class HistoryEntry(NamedTuple):
    at: float
    event: str
    state: RankState  # after the event


class InvalidTransitionError(RuntimeError):
    """An event that cannot happen in this state: a bug, here or in the peer. The message has the history."""


class RankHealth:
    def __init__(
        self,
        rank_id: RankId,
        now: float,
        *,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self.rank_id = rank_id
        self.cause: str | None = None  # of the death
        self.history: deque[HistoryEntry] = deque([HistoryEntry(now, "created", RankState.STARTING)], maxlen=_HISTORY_LEN)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._life = _Life.STARTING
        self._wanted = RankState.READY
        self._said = RankState.READY
        self._doubt: RankState | None = None
        self._has_spoken = False
        self._is_called_ready = False  # by the launcher
        self._step = -1
        self._has_work = False
        self._seen_at = now
        self._progress_at = now

    @property
    def state(self) -> RankState:
        if self._doubt is not None:
            return self._doubt
        if self._life is not _Life.SERVING:
            return RankState(self._life)
        return self._wanted if self._said is RankState.READY else self._said

    @property
    def is_eligible(self) -> bool:
        """May get new requests."""
        return self.state is RankState.READY

    @property
    def is_serving(self) -> bool:
        """May have requests: alive as far as is proven, in doubt or not."""
        return self._life is _Life.SERVING

    @property
    def refuses_requests(self) -> bool:
        """The engine itself would send them back."""
        return self._said is not RankState.READY

    @property
    def _owes_word(self) -> bool:
        return self._is_called_ready and not self._has_spoken and self._life in (_Life.STARTING, _Life.RESTARTING)

    @property
    def _stands_still(self) -> bool:
        return self._said in _STANDS_STILL or self._wanted in _STANDS_STILL

    def last_seen_s(self, now: float) -> float:
        return now - self._seen_at

    def last_progress_s(self, now: float) -> float:
        """Since it last made a step, had nothing to do, or was meant to stand still."""
        return now - self._progress_at

    def on_first_word(self, now: float) -> None:
        """Its `EngineReady` reached this front end. What it needs before it serves may take any time."""
        self._has_spoken = True
        if not self.is_serving:
            self._set_doubt(None, "its first word", now)

    def on_ready(self, now: float) -> None:
        """It takes requests from this front end."""
        self._has_spoken = True
        self._move(_Event.READY, now)
        self._seen_at = self._progress_at = now

    def on_dead(self, now: float, cause: str) -> None:
        """A proof of death. Later ones are no-ops."""
        if self.cause is None:
            self.cause = cause
        self._move(_Event.DIED, now)

    def on_launcher_state(self, state: str, now: float) -> None:
        """The launcher's verdict, repeated with every snapshot."""
        if state not in _TOLD:
            raise ValueError(f"{self.rank_id}: unknown launcher state {state!r}; one of {', '.join(_TOLD)}")
        if _TOLD[state] is _Event.TOLD_SERVING:
            if self._stands_still:  # time at a standstill is no stall
                self._progress_at = now
            self._wanted = RankState(state)
        self._move(_TOLD[state], now)
        if _TOLD[state] is _Event.TOLD_SERVING and not self._is_called_ready:
            self._is_called_ready = True
            if not self.is_serving:
                self._seen_at = self._progress_at = now

    def on_engine_state(self, state: EngineState, now: float) -> None:
        """What the engine says of itself, repeated with every heartbeat."""
        if RankState(state) is self._said:
            return
        if self._stands_still:
            self._progress_at = now
        self._said = RankState(state)
        self._remember(f"engine: {state}", now)

    def on_sign_of_life(self, now: float, step: int, has_work: bool) -> None:
        """Any frame of the rank. A frame that comes before its first word or after its end says nothing."""
        if not self.is_serving:
            return
        self._seen_at = now
        if step > self._step or not has_work or self._stands_still:
            self._progress_at = now
        self._step = max(self._step, step)
        self._has_work = has_work
        if self._doubt is not None:
            self._set_doubt(RankState.STALLED if self._is_stalled(now) else None, "sign of life", now)

    def on_timer(self, now: float, *, has_own_work: bool = False) -> RankState | None:
        """Begins to doubt where it is time to. Returns the new state, if it changed.

        `has_own_work` says that we sent it something that has not ended: a silent rank cannot say so itself.
        """
        if not self.is_serving and not self._owes_word:
            return None
        if (self._has_work or has_own_work or self._owes_word) and self._is_stalled(now):
            return self._set_doubt(RankState.STALLED, f"no step for {self.last_progress_s(now):.1f} s", now)
        if self.last_seen_s(now) >= self._heartbeat_timeout_s:
            return self._set_doubt(RankState.SUSPECT, f"silent for {self.last_seen_s(now):.1f} s", now)
        return None

    def _is_stalled(self, now: float) -> bool:
        return not self._stands_still and self.last_progress_s(now) >= self._stall_timeout_s

    def _set_doubt(self, doubt: RankState | None, event: str, now: float) -> RankState | None:
        if doubt is self._doubt:
            return None
        self._doubt = doubt
        self._remember(event, now)
        return self.state

    def _move(self, event: _Event, now: float) -> None:
        if (self._life, event) not in _TRANSITIONS:
            history = "; ".join(f"{entry.at:.3f} {entry.event} → {entry.state}" for entry in self.history)
            raise InvalidTransitionError(f"{self.rank_id}: {event!s} cannot happen in state {self.state}; history: {history}")
        before, self._life = self._life, _TRANSITIONS[self._life, event]
        if self._life is not before:
            self._doubt = None
        if self.state is not self.history[-1].state:
            self._remember(event, now)

    def _remember(self, event: str, now: float) -> None:
        self.history.append(HistoryEntry(now, event, self.state))

    def check_invariants(self) -> None:
        assert self._doubt in (None, RankState.SUSPECT, RankState.STALLED)
        assert self._doubt is None or self.is_serving or self._owes_word
        assert {self._wanted, self._said} <= {RankState.READY, RankState.DRAINING, *_STANDS_STILL}
        assert self.history[-1].state is self.state
        assert len(self.history) <= _HISTORY_LEN

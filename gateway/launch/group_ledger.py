"""What the launcher knows of its ranks, and what follows from a death. Knows no process, socket or clock.

Rules
-----
* A life of a rank is a `RankId`. Whatever is said about a life that is over is ignored: the first proof of a death counts.
* A rank that dies before the whole group has been up once fails the start: a second try would hide a wrong setting.
* After that it gets a new life, later each time, and at most `max_restarts` times within ten minutes.
* A life that ends by an operator's order costs nothing of that: the rank gets its next life at once, or is gone.
* Nor does one that is lost with its node: no rank can be blamed for that, and where there is room is the rank launcher's care.
* A rank that is added to a running group and dies before it was ready once is gone again.
* When no rank is left the group has failed. If somebody stays up all the same, an operator's order can bring ranks back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cores.control_messages import GroupState, RankRecord
from cores.messages import RankId
from gateway.launch.restart_budget import RestartBudget

FIRST_BACKOFF_S = 1.0

_TRANSITIONS = {
    ("new", "begin"): "starting",
    ("dead", "begin"): "restarting",
    ("starting", "ready"): "ready",
    ("restarting", "ready"): "ready",
    ("starting", "died"): "dead",
    ("restarting", "died"): "dead",
    ("ready", "died"): "dead",
    ("ready", "drain"): "draining",
    ("draining", "undrain"): "ready",
    ("draining", "died"): "dead",
}


class OrderError(Exception):
    """An operator's order that cannot be carried out. `kind` as in `GroupOrderDone`."""

    def __init__(self, message: str, kind: str = "conflict") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Restart:
    """It gets another life after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The group never came up: end everything."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It stays dead."""


@dataclass(frozen=True, slots=True)
class Removed:
    """It is no rank of the group any more."""


Verdict = Restart | StartFailed | GivenUp | Removed


_LEAVING = {"restart": "restart", "remove": "removal"}


@dataclass(slots=True)
class _Rank:
    budget: RestartBudget
    epoch: int = 0
    state: str = "new"
    cause: str | None = None
    pid: int | None = None
    restart_pending: bool = False
    restarts: int = 0
    progress: float = 0.0  # of loading its weights
    leaving: Literal["", "restart", "remove"] = ""  # what becomes of it when this life has ended
    is_added: bool = False  # to a running group, and was not ready yet
    is_node_lost: bool = False  # its last life died with its node
    num_drain_orders: int = 0  # in this life


class GroupLedger:
    """The group's state machine. Times are monotonic seconds."""

    def __init__(self, ranks: Iterable[int], max_restarts: int, *, stays_up: bool = False) -> None:
        self._max_restarts = max_restarts
        self._stays_up = stays_up
        self._ranks = {rank: _Rank(RestartBudget(max_restarts, FIRST_BACKOFF_S)) for rank in ranks}
        self._removed: dict[int, _Rank] = {}  # a frame of theirs must not pass for a successor's, and counters go on
        self._was_up = False
        self.failed: str | None = None  # the start failed, or no rank is left

    @property
    def was_up(self) -> bool:
        """Every rank has been ready, if not all at this moment."""
        return self._was_up

    def snapshot(self) -> GroupState:
        records = tuple(
            RankRecord(
                rank,
                r.epoch,
                state="starting" if r.state == "new" else r.state,
                cause=r.cause,
                restarts=r.restarts,
                pid=r.pid,
                restart_pending=r.restart_pending,
                is_leaving=bool(r.leaving),
                start_progress=r.progress,
                is_node_lost=r.is_node_lost,
                num_drain_orders=r.num_drain_orders,
            )
            for rank, r in self._ranks.items()
            if not (r.is_added and r.state == "new")  # its epoch is still the last one of a rank that was removed
        )
        return GroupState(records, self.failed)

    def begin(self, rank: int) -> RankId:
        """A new life starts."""
        r = self._ranks[rank]
        self._move(rank, "begin")
        r.epoch += 1
        r.pid, r.progress, r.num_drain_orders = None, 0.0, 0
        r.restart_pending = r.is_node_lost = False
        return RankId(rank, r.epoch)

    def on_process(self, rank_id: RankId, pid: int | None) -> None:
        if self._is_current(rank_id):
            self._ranks[rank_id.rank].pid = pid

    def on_progress(self, rank_id: RankId, progress: float) -> None:
        if self._is_current(rank_id):
            self._ranks[rank_id.rank].progress = progress

    def on_ready(self, rank_id: RankId) -> bool:
        """True when it was news."""
        if not self._is_current(rank_id) or self._ranks[rank_id.rank].state == "ready":
            return False
        self._move(rank_id.rank, "ready")
        self._ranks[rank_id.rank].is_added = False
        self._was_up = self._was_up or all(r.state == "ready" for r in self._ranks.values())
        return True

    def on_death(self, rank_id: RankId, cause: str, now: float, *, is_node_lost: bool = False) -> Verdict | None:
        """What follows; None when that life was over already."""
        if not self._is_current(rank_id):
            return None
        self._move(rank_id.rank, "died")
        self._ranks[rank_id.rank].cause = cause
        self._ranks[rank_id.rank].is_node_lost = is_node_lost
        if not self._was_up:
            self.failed = f"rank {rank_id.rank} did not start: {cause}"
            return StartFailed()
        return self._obey_order(rank_id.rank) or self._restart_or_give_up(rank_id.rank, now)

    def give_up(self, rank: int, cause: str) -> None:
        """It is dead and stays so, whatever its state: for a reason that lies with us."""
        r = self._ranks[rank]
        r.state, r.cause, r.restart_pending, r.leaving = "dead", cause, False, ""
        r.budget = RestartBudget(0, FIRST_BACKOFF_S)
        if not self._was_up:
            self.failed = self.failed or f"rank {rank} did not start: {cause}"
        elif self._is_nobody_left():
            self.failed = self.failed or f"no rank is left; rank {rank} was the last to die: {cause}"

    def retire(self) -> None:
        """The group is being shut down: no rank gets another life."""
        for r in self._ranks.values():
            r.restart_pending, r.leaving = False, ""
            r.budget = RestartBudget(0, FIRST_BACKOFF_S)
        if self._is_nobody_left():
            self.failed = self.failed or "all ranks were dead when the group was shut down"

    # --- orders of an operator ---

    def drain(self, rank: int) -> None:
        """It gets no more requests. Raises `OrderError`, as all below."""
        r = self._find(rank)
        if r.state not in ("ready", "draining"):
            raise OrderError(f"rank {rank} is {r.state}: only a rank that is ready can be drained")
        if r.state == "ready":
            self._move(rank, "drain")

    def undrain(self, rank: int) -> None:
        r = self._find(rank)
        if r.leaving:
            raise OrderError(f"rank {rank} drains for its {_LEAVING[r.leaving]}, which goes on")
        if r.state not in ("ready", "draining"):
            raise OrderError(f"rank {rank} is {r.state}: only a rank that drains can be taken back")
        if r.state == "draining":
            self._move(rank, "undrain")

    def leave(self, rank: int, leaving: Literal["restart", "remove"]) -> None:
        """Drains it; when its life ends, it has been restarted or removed by order."""
        if self._find(rank).leaving:
            raise OrderError(f"rank {rank} drains already, for its {_LEAVING[self._find(rank).leaving]}")
        self.drain(rank)
        self._find(rank).leaving = leaving

    def is_down(self, rank: int) -> bool:
        """It is dead and would stay so."""
        r = self._find(rank)
        return r.state == "dead" and not r.restart_pending

    def revive(self, rank: int) -> None:
        """One that is down may begin another life, and die as often as a new one."""
        assert self.is_down(rank)
        self._reopen()
        r = self._ranks[rank]
        r.budget = RestartBudget(self._max_restarts, FIRST_BACKOFF_S)
        r.restarts += 1
        r.restart_pending = True

    def _reopen(self) -> None:
        """A rank comes that may be the only one."""
        if self.failed is not None and not (self._was_up and self._stays_up):
            headline = self.failed.partition("\n")[0]
            raise OrderError(f"the group has ended ({headline}): start the server again")
        self.failed = None

    def add(self, rank: int) -> None:
        assert rank not in self._ranks
        self._reopen()
        budget = RestartBudget(self._max_restarts, FIRST_BACKOFF_S)
        epoch, restarts = self._past(rank)
        self._ranks[rank] = _Rank(budget, epoch=epoch, restarts=restarts, is_added=True)

    def _past(self, rank: int) -> tuple[int, int]:
        """Epoch and restarts of the removed rank that had this number."""
        removed = self._removed.get(rank)
        return (0, 0) if removed is None else (removed.epoch, removed.restarts)

    def remove_down(self, rank: int) -> None:
        """Takes one away that is down."""
        assert self.is_down(rank)
        self._drop(rank)

    def is_ready(self, rank: int) -> bool:
        r = self._ranks.get(rank)
        return r is not None and r.state == "ready"

    def state(self, rank: int) -> str:
        return self._find(rank).state

    def cause(self, rank: int) -> str | None:
        """Of its last death."""
        return self._find(rank).cause

    def epoch(self, rank: int) -> int:
        return self._find(rank).epoch

    @property
    def ranks(self) -> list[int]:
        return list(self._ranks)

    def _find(self, rank: int) -> _Rank:
        if rank not in self._ranks:
            there = ", ".join(map(str, sorted(self._ranks)))
            raise OrderError(f"rank {rank} does not exist; the ranks are {there}", "unknown rank")
        return self._ranks[rank]

    def _obey_order(self, rank: int) -> Restart | Removed | None:
        r = self._ranks[rank]
        if r.leaving == "restart":
            r.leaving, r.restart_pending = "", True
            r.restarts += 1
            return Restart(0.0)
        if r.leaving == "remove" or r.is_added:
            self._drop(rank)
            if self._is_nobody_left():
                what = "was removed" if r.leaving else f"was added and did not start: {r.cause}"
                self.failed = f"no rank is left; rank {rank} {what}"
            return Removed()
        return None

    def _drop(self, rank: int) -> None:
        self._removed[rank] = self._ranks.pop(rank)

    # --- what follows from a death ---

    def _restart_or_give_up(self, rank: int, now: float) -> Verdict:
        r = self._ranks[rank]
        delay_s = r.budget.take_free() if r.is_node_lost else r.budget.take(now)
        if delay_s is not None:
            r.restarts += 1
            r.restart_pending = True
            return Restart(delay_s)
        if self._is_nobody_left():
            self.failed = f"no rank is left; rank {rank} was the last to die: {r.cause}"
        return GivenUp()

    def _is_nobody_left(self) -> bool:
        return all(r.state == "dead" and not r.restart_pending for r in self._ranks.values())

    def _is_current(self, rank_id: RankId) -> bool:
        r = self._ranks.get(rank_id.rank)
        return r is not None and r.epoch == rank_id.epoch and r.state not in ("new", "dead")

    def _move(self, rank: int, event: str) -> None:
        r = self._ranks[rank]
        key = (r.state, event)
        assert key in _TRANSITIONS, f"rank {rank} in epoch {r.epoch}: {event!r} while {r.state!r}"
        r.state = _TRANSITIONS[key]
        r.num_drain_orders += event in ("drain", "undrain")

    def check_invariants(self) -> None:
        for rank, r in self._ranks.items():
            assert r.epoch >= r.restarts, f"rank {rank}: more restarts than lives"
            r.budget.check_invariants()
            assert r.state == "dead" or not r.restart_pending, f"rank {rank} is alive and awaits a restart"
            assert r.state == "draining" or not r.leaving, f"rank {rank} is {r.state} and leaves"
            first, _ = self._past(rank)
            assert (r.state == "new") == (r.epoch == first), f"rank {rank}: state {r.state} in epoch {r.epoch} after {first}"
        assert not self._is_nobody_left() or self.failed is not None, "no rank is left and nobody says why"

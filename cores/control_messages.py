"""What goes over the launcher's control socket: frozen values, grouped by who reads them. `codec` turns them into bytes.

`messages` has the rules for wire types, and what an engine says to the launcher as well as to front ends: `EngineReady` and
`EngineCoreDead`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cores.messages import RankId


def log_identity(rank_id: RankId) -> bytes:
    """The name at the launcher's ROUTER of what brings that life's output."""
    return rank_id.identity + b"-log"


def front_end_identity(index: int) -> bytes:
    """Its name at the launcher's ROUTER."""
    return b"front-end-%d" % index


# --- engine core → launcher -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineStarting:
    """Sign of life while weights load."""

    rank_id: RankId
    pid: int
    text: str
    progress: float = 0.0  # how much of its weights it has loaded, from 0 to 1


@dataclass(frozen=True, slots=True)
class EngineAlive:
    """Every half second from when it is ready, whatever the engine does. `LauncherAlive` answers it, or, when that life is over
    for the launcher, `Shutdown`."""

    rank_id: RankId


@dataclass(frozen=True, slots=True)
class RankLog:
    """Lines that the process has written, from where the launcher cannot read them itself."""

    rank_id: RankId
    lines: tuple[str, ...]


# --- launcher → engine core; `Shutdown` also → front end --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish what runs for at most `timeout_s`, abort the rest, send every client its final outputs, then end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class LauncherAlive:
    """Answers `EngineAlive`."""


@dataclass(frozen=True, slots=True)
class AttachFrontEnd:
    """The front end of that index is a new process: drop what the old one asked for, connect here and say `EngineReady` as at
    the start."""

    index: int
    input_address: str
    output_address: str


# --- launcher → front end ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The launcher's verdict on one rank."""

    rank: int
    epoch: int
    state: str  # "starting", "ready", "dead", "restarting", "draining"
    cause: str | None = None  # of the last death
    restarts: int = 0
    pid: int | None = None
    restart_pending: bool = False  # "dead", but another life is coming: requests may wait for it
    is_leaving: bool = False  # this life ends by an operator's order: its end is nobody's fault
    start_progress: float = 0.0  # how much of its weights it has loaded, from 0 to 1
    is_node_lost: bool = False  # it died with its node: so it was no request that it died of
    num_drain_orders: int = 0  # how often this life has been drained or taken back


@dataclass(frozen=True, slots=True)
class GroupOrderDone:
    """Answers `GroupOrder`; `error` is None when all of it was done."""

    order_id: int
    error: str | None = None
    error_kind: str = ""  # "unknown rank", "conflict", "failed"


@dataclass(frozen=True, slots=True)
class GroupState:
    """All ranks at once: a reader that missed one is right again with the next. A rank that is not in it any more is gone."""

    ranks: tuple[RankRecord, ...]
    failed: str | None = None  # start-up failed for good; why


# --- front end → launcher ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontEndHello:
    """Sent once the front end's sockets are bound: engines can be told where to connect."""

    index: int
    pid: int
    input_address: str
    output_address: str


@dataclass(frozen=True, slots=True)
class FrontEndReady:
    """It serves requests; `mode` is the class of its core client."""

    index: int
    mode: str


@dataclass(frozen=True, slots=True)
class FrontEndFailed:
    """It gave up; the cause ends up in the launcher's last log line and exit code."""

    index: int
    cause: str


@dataclass(frozen=True, slots=True)
class RankDied:
    """A front end saw a proof of death."""

    rank_id: RankId
    cause: str


@dataclass(frozen=True, slots=True)
class AbortElsewhere:
    """Somebody asked this front end to abort the requests of that id; the launcher tells the others."""

    request_id: str | None  # None: all that no rank has yet
    tenant: str | None = None  # whose they must be; None: whoever's
    asker: int = 0
    call_id: int = 0  # of the front end that asks; 0: it wants no answer


@dataclass(frozen=True, slots=True)
class AbortedElsewhere:
    """The answer of a front end to one that wants it; the launcher passes it on."""

    asker: int
    call_id: int
    found: bool  # it had such a request


@dataclass(frozen=True, slots=True)
class RankIdle:
    """A draining rank has no request of this front end any more, and gets none."""

    index: int
    rank_id: RankId


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """What an operator wants of the group."""

    order_id: int
    action: str  # "drain", "undrain", "restart", "scale"
    rank: int = 0  # all but "scale"
    size: int = 0  # "scale": how many ranks there shall be
    drain_timeout_s: float = 0.0  # "restart", "scale": what the requests of a rank get before they move


@dataclass(frozen=True, slots=True)
class RankSuspected:
    """A front end has not heard of the rank for a while. Only a hint."""

    rank_id: RankId
    silent_s: float


@dataclass(frozen=True, slots=True)
class RankStalled:
    """It has work and makes no step, for longer than it is allowed to: the launcher kills and replaces it."""

    rank_id: RankId
    cause: str


ControlMessage = (
    EngineStarting | EngineAlive | RankLog
    | Shutdown | LauncherAlive | AttachFrontEnd
    | GroupOrderDone | GroupState
    | FrontEndHello | FrontEndReady | FrontEndFailed | RankDied | AbortElsewhere | AbortedElsewhere | RankIdle | GroupOrder
    | RankSuspected | RankStalled
)  # fmt: skip

"""The busy loop of an engine core: commands from one queue, outputs and the engine's state into another. Knows no sockets.

`EngineCoreProc` puts an input thread before it and an output thread behind it, so that neither a flood of requests nor a slow
front end stands between two steps.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from cores.config import FrontEndAddress
from cores.control_messages import Shutdown
from cores.engine_core import EngineCore
from cores.messages import (
    AbortRequests,
    AddRequest,
    CacheEvents,
    Command,
    EngineCoreOutputs,
    EngineState,
    RankLoad,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
    WatchCache,
)

MAX_COMMANDS_PER_STEP = 512  # a flood of requests may delay a step by some ten milliseconds, no more


@dataclass(frozen=True, slots=True)
class ClientCommand:
    client: int
    command: Command


@dataclass(frozen=True, slots=True)
class ClientOverflow:
    """A front end does not read: no more for it."""

    client: int


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread beside the loop has ended with an error, and the engine with it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class FrontEndAttached:
    """A front end is a new process. What its predecessor asked for ends, and outputs go to the new address."""

    address: FrontEndAddress


Inbound = ClientCommand | ClientOverflow | FrontEndAttached | Shutdown | ThreadFailed


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What heartbeats and load reports tell, as of the loop's last turn."""

    step: int
    has_work: bool  # `Heartbeat` says of what kind
    load: RankLoad
    stats: SchedulerStats
    command_seqs: dict[int, int]  # by front end
    state: EngineState = EngineState.READY
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class LoopTurn:
    """One turn of the loop: the state after it, and by front end its outputs and what happened to the cache."""

    status: EngineStatus
    outputs: dict[int, EngineCoreOutputs]
    cache_events: dict[int, CacheEvents] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UtilityReply:
    client: int
    result: UtilityResult


@dataclass(frozen=True, slots=True)
class LastWords:
    """Nothing follows. `cause` is empty for an orderly end."""

    cause: str


Outbound = LoopTurn | UtilityReply | FrontEndAttached | LastWords


class EngineLoop:
    def __init__(
        self,
        core: EngineCore,
        inbox: queue.SimpleQueue[Inbound],
        outbox: queue.SimpleQueue[Outbound],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._drain_deadline_s: float | None = None  # set: no new requests, and this is the end of the running ones

    def run(self) -> None:
        """Returns when a shutdown is complete, all final outputs queued. Raises what makes the engine unusable."""
        while not self._is_over():
            num_applied = self._take_commands()
            if num_applied and self._core.has_work and len(self._core.command_seqs) > 1:
                # A step with a long prompt takes hundreds of milliseconds. Told only after it, all other front ends would send
                # to this rank, too: with four of them p99 queue delay was ten times that of one.
                self._outbox.put(LoopTurn(self.status(), {}))
            self._turn()
        self._refuse_the_rest()

    def status(self, *, is_operating: bool = False) -> EngineStatus:
        core = self._core
        has_work = core.has_work and not is_operating
        return EngineStatus(
            core.step_count, has_work, core.load(), core.stats(), dict(core.command_seqs), core.state,
            core.operations.weight_version,
        )  # fmt: skip

    def _turn(self) -> None:
        outputs = self._core.step()
        late_results = self._core.take_late_results()  # what they do, the status must know
        self._outbox.put(LoopTurn(self.status(), outputs, self._core.cache_watch.take_events()))
        for client, result in late_results:
            self._outbox.put(UtilityReply(client, result))

    def _is_over(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        stands_still = self._core.has_requests and not self._core.has_work
        if stands_still or (self._core.has_work and self._clock() >= self._drain_deadline_s):
            self._core.abort_all()
            self._turn()
        return not self._core.has_work

    def _refuse_the_rest(self) -> None:
        """What arrived while the last requests ended still gets its final output."""
        self._take_commands()
        self._turn()

    def _take_commands(self) -> int:
        """Everything that has arrived, and how much it was; sleeps for it when there is nothing else to do."""
        num_applied = 0
        if not self._core.has_work and self._drain_deadline_s is None:
            self._apply(self._inbox.get())
            num_applied = 1
        for _ in range(MAX_COMMANDS_PER_STEP):
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._apply(message)
            num_applied += 1
        return num_applied

    def _apply(self, message: Inbound) -> None:
        match message:
            case ClientCommand(client, command):
                self._apply_command(client, command)
            case ClientOverflow(client):
                self._core.abort_all(client)
            case FrontEndAttached(address):
                self._core.forget_client(address.index)
                # Reports tell the last turn's state, in which the predecessor's commands still count: told to the new one,
                # it would make every command of it look like an old one.
                self._outbox.put(LoopTurn(self.status(), {}))
                self._outbox.put(message)  # behind the last outputs for the old one
            case Shutdown(timeout_s):
                deadline_s = self._clock() + timeout_s
                self._drain_deadline_s = min(deadline_s, self._drain_deadline_s or deadline_s)
            case ThreadFailed(error):
                raise error

    def _apply_command(self, client: int, command: Command) -> None:
        match command:
            case AddRequest(_, request) if self._drain_deadline_s is not None:
                self._core.refuse_request(client, request.handle)
            case AddRequest(_, request):
                self._core.add_request(client, request)
            case AbortRequests(_, handles):
                self._core.abort_requests(client, handles)
            case UtilityCall():
                self._operate(client, command)
            case WatchCache():
                self._core.cache_watch.watch(client)
                self._outbox.put(LoopTurn(self.status(), {}, self._core.cache_watch.take_events()))
        self._core.note_command(client, command.seq)

    def _operate(self, client: int, call: UtilityCall) -> None:
        # While it runs, heartbeats go on and say that no step is to be expected: new weights may take minutes.
        self._outbox.put(LoopTurn(self.status(is_operating=True), {}))
        result = self._core.call_utility(call, client)
        # The state before the answer: whoever has read that the engine is paused must not hear that it is ready.
        self._outbox.put(LoopTurn(self.status(), {}, self._core.cache_watch.take_events()))
        if result is not None:
            self._outbox.put(UtilityReply(client, result))

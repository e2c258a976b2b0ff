"""The process that owns the ranks: starts everything in order, tells the front end how the group is, ends everything in order.

Rules
-----
* Start: control socket, coordinator, front end and whatever the rank launcher needs; then all ranks at once, as soon as the
  front end has said where it listens; then the front end's ready message. Over tcp the rank launcher is first: it alone knows
  by which address ranks on other nodes reach this one.
* The end is the start reversed. The front end drains while its ranks still live; then the ranks end, then what they ran on.
* Every wait has a bound. What is beyond help is said once, through `failure`; the first cause counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from cores.codec import Message
from cores.config import UNIX_SOCKETS, FrontEndAddress, Transport
from cores.control_messages import (
    AbortedElsewhere,
    AbortElsewhere,
    AttachFrontEnd,
    EngineAlive,
    EngineStarting,
    FrontEndFailed,
    FrontEndHello,
    FrontEndReady,
    GroupOrder,
    GroupOrderDone,
    GroupState,
    LauncherAlive,
    RankDied,
    RankIdle,
    RankLog,
    RankStalled,
    RankSuspected,
    Shutdown,
    front_end_identity,
)
from cores.curve import GroupKey
from cores.launch.interface import LaunchError, RankLauncher
from cores.launch.rank_environment import Machine, threads_per_rank
from cores.launch.rank_log import show
from cores.messages import EngineCoreDead, EngineReady, RankId
from gateway.config import GatewayConfig
from gateway.launch.control import ControlSocket
from gateway.launch.coordinator_process import make_coordinator
from gateway.launch.front_end_process import DRAIN_MARGIN_S, HELLO_TIMEOUT_S, ChildFrontEnd, FrontEnd, ParentFrontEnd
from gateway.launch.group_ledger import GroupLedger
from gateway.launch.group_operations import GroupOperations
from gateway.launch.rank_plan import RankPlan
from gateway.launch.rank_supervisor import RankSupervisor
from gateway.launch.ranks import address_to_bind, ranks_on_node, runs_over_tcp

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_TIMEOUT_S = 120.0  # the rank launcher's own bounds strike first
FRONT_END_READY_TIMEOUT_S = 60.0
# With no rank left the front end answers 503 with the cause for a moment, then ends by itself; this is for one that does not.
WATCHDOG_S = 5.0
TICK_INTERVAL_S = 0.25  # how often lost nodes are looked for
MAX_TICK_S = 1.0
RANK_END_TIMEOUT_S = 5.0  # nothing is in flight any more
FAILED_END_TIMEOUT_S = 2.0  # per stage, when everything has failed: 10 s for all of it, watchdog included


class StartError(RuntimeError):
    """The group did not start. One line, then the engine's traceback if there is one."""


class Launcher:
    """One endpoint: its ranks, its front ends and, beside rank 0 of several endpoints, the coordinator.

    With a `listener` the front ends are children that serve HTTP on it; without, the one is the process that started this one.
    """

    def __init__(
        self,
        config: GatewayConfig,
        rank_launcher: RankLauncher,
        run_directory: Path,
        listener: socket.socket | None = None,
        url: str = "",
        on_listening: Callable[[str, Transport], None] = lambda control_address, transport: None,
    ) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._rank_launcher = rank_launcher
        self._run_directory = run_directory
        self._on_listening = on_listening
        self._transport = UNIX_SOCKETS
        self._control = ControlSocket(self._on_message)
        self._is_embedded = listener is None
        self._stays_up = self._is_embedded or config.fault.keep_alive_on_engine_death
        ledger = GroupLedger(config.parallel.ranks, config.fault.engine_restarts, stays_up=self._stays_up)
        self._ranks = RankSupervisor(ledger, rank_launcher, self._on_group_state, self._on_no_rank_left)
        self._front_ends: list[FrontEnd] = (
            [ParentFrontEnd(self._on_hello)]
            if listener is None
            else [
                ChildFrontEnd(
                    index, config, listener, run_directory, url, self._on_hello, self._on_front_end_failed,
                )
                for index in range(config.server.api_server_count)
            ]
        )  # fmt: skip
        self._operations = GroupOperations(self._ranks)
        self._orders: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._last_death: str | None = None  # of the last rank, when no rank is left
        self._coordinator = make_coordinator(config)
        self._addresses: dict[int, FrontEndAddress] = {}  # of the front ends that have said hello, by index
        self._all_said_hello = asyncio.Event()
        self._shutdown: Shutdown | None = None  # the order that front ends have been given
        self._has_started = False

    @property
    def group(self) -> GroupState:
        return self._ranks.snapshot()

    @property
    def is_starting(self) -> bool:
        """Neither serving nor at an end."""
        return not self._has_started and self._shutdown is None and not self.failure.done()

    @property
    def mode(self) -> str:
        """The class of the front end's core client, once it is ready."""
        return self._front_ends[0].mode

    # --- start ---

    async def start(self) -> None:
        """Returns when requests are served. Raises `StartError`; `stop` is due in every case."""
        try:
            await self._start()
            self._has_started = True
        except (StartError, LaunchError) as error:
            self._fail(str(error))
            self._ranks.give_up(str(error))  # the front end learns the cause, too
            raise StartError(str(error)) from error

    async def _start(self) -> None:
        opening = asyncio.create_task(self._or_failure(self._rank_launcher.open(), OPEN_TIMEOUT_S, "what ranks run on"))
        try:
            if runs_over_tcp(self._config.parallel):
                await opening
                host = address_to_bind(self._config.parallel) or self._rank_launcher.host
                self._transport = Transport(host=host, curve_secret=GroupKey.make().secret.decode())
            self._listen()
            self._coordinator.start()
            for front_end in self._front_ends:
                front_end.start(self._control.address, self._transport)
            # First, although both are under way: a front end that is not there yet could not be told why the other failed.
            await self._or_failure(self._all_said_hello.wait(), HELLO_TIMEOUT_S + 5, "the front ends' first messages")
            await opening
        finally:
            opening.cancel()
            await asyncio.wait({opening})
        ranks = self._config.parallel.ranks
        logger.info("starting %s", f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}")
        self._ranks.start(self._plan(), ranks)
        self._ticker = asyncio.create_task(self._tick(), name="launcher-ticker")
        self._ticker.add_done_callback(self._on_ticker_done)
        # The ranks' own bounds strike first, with the cause.
        ready_timeout_s = self._config.fault.engine_ready_timeout + FRONT_END_READY_TIMEOUT_S
        await self._or_failure(self._ranks.up.wait(), ready_timeout_s, "the ranks")
        for front_end in self._front_ends:
            await self._or_failure(front_end.ready.wait(), FRONT_END_READY_TIMEOUT_S, "the front end")

    def _listen(self) -> None:
        try:
            address = self._transport.address(str(self._run_directory), "control")
            self._control.start(address, GroupKey.of(self._transport))
        except zmq.ZMQError as error:
            raise StartError(f"cannot open the launcher's socket {address}: {error}") from error
        if self._transport.host is not None:
            logger.info("ranks and front ends meet at %s, over tcp with CURVE", self._transport.host)
        self._on_listening(self._control.address, self._transport)

    def _plan(self) -> RankPlan:
        parallel = self._config.parallel
        local = ranks_on_node(parallel)
        return RankPlan(
            engine=self._config.engine,
            control_address=self._control.address,
            front_ends=tuple(self._addresses.values()),
            num_threads=threads_per_rank(Machine.here(), len(local), os.environ),
            first_rank=local[0],
            ready_timeout_s=self._config.fault.engine_ready_timeout,
            log_level=self._config.log_level,
            transport=self._transport,
            log_format=self._config.log_format,
        )

    async def _tick(self) -> None:
        looked_s, was_late = time.monotonic(), False
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            now = time.monotonic()
            # A pause of our own proves nothing about nodes: what was said meanwhile is still to be read, once.
            was_late = now - looked_s >= MAX_TICK_S and not was_late
            if not was_late:
                self._ranks.look_for_lost_nodes(now)
            looked_s = now

    def _on_ticker_done(self, task: asyncio.Task[None]) -> None:
        """Without it the ranks of a lost node would look alive until Ray says otherwise."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the launcher's ticker ended", exc_info=error)
            self._fail(f"the launcher's ticker ended: {error!r}")

    async def _or_failure(self, awaited: Awaitable[T], timeout_s: float, what: str) -> T:
        task = asyncio.ensure_future(awaited)
        first: set[asyncio.Future[Any]] = {task, self.failure}
        try:
            await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                raise StartError(self.failure.result())
            if not task.done():
                raise StartError(f"gave up waiting for {what} after {timeout_s:g} s")
            return task.result()
        finally:
            task.cancel()

    # --- what others say ---

    def _on_message(self, identity: bytes, message: Message) -> None:
        match message:
            case EngineStarting() | EngineReady() | EngineAlive() if self._ranks.is_over(message.rank_id):
                # Declared dead when its node was cut off, say, and heard again. Others compute what it had to do.
                self._ranks.note_revenant(message.rank_id)
                self._control.send(identity, Shutdown(0.0))
            case RankLog():
                show(message)
            case (
                EngineStarting()
                | EngineReady()
                | EngineAlive()
                | EngineCoreDead()
                | RankDied()
                | RankSuspected()
                | RankStalled()
            ):
                self._ranks.on_message(message)
                if isinstance(message, EngineAlive):
                    self._control.send(identity, LauncherAlive())
                if isinstance(message, EngineStarting):
                    self._attach_front_ends(message.rank_id)
            case FrontEndFailed() if self._last_death is not None:
                self._on_front_end_failed(message.cause)
            case FrontEndHello() | FrontEndReady() | FrontEndFailed() if 0 <= message.index < len(self._front_ends):
                self._front_ends[message.index].on_message(message)
            case AbortElsewhere():
                self._tell_front_ends(message, besides=identity)
            case AbortedElsewhere(asker=asker) if 0 <= asker < len(self._front_ends):
                self._control.send(front_end_identity(asker), message)
            case RankIdle(index=index, rank_id=rank_id):
                self._ranks.on_idle(index, rank_id)
            case GroupOrder():
                task = asyncio.create_task(self._obey(identity, message), name=f"order to {message.action}")
                self._orders.add(task)
                task.add_done_callback(self._orders.discard)
            case _:
                logger.warning("control socket: %r sent %s, which is not for a launcher", identity, type(message).__name__)

    async def _obey(self, identity: bytes, order: GroupOrder) -> None:
        parallel = self._config.parallel
        if not self._ranks.up.is_set() or self._shutdown is not None:
            done = GroupOrderDone(order.order_id, "the group is starting or ending: no order can be carried out", "conflict")
        elif order.action == "scale" and (parallel.has_others or parallel.data_parallel_size == 1):
            needs = "the number of ranks can only change where --data-parallel-size is 2 or more and one endpoint has all ranks"
            done = GroupOrderDone(order.order_id, needs, "conflict")
        else:
            try:
                done = await self._operations.carry_out(order)
            except asyncio.CancelledError:  # by the end of the server, which whoever gave it would wait for
                ends = GroupOrderDone(order.order_id, "the server ends: the order was not carried out", "conflict")
                self._control.send(identity, ends)
                raise
        self._control.send(identity, done)

    def _on_hello(self, address: FrontEndAddress) -> None:
        self._addresses[address.index] = address
        if len(self._addresses) == len(self._front_ends):
            self._all_said_hello.set()
        if self._ranks.is_started:
            self._ranks.replace_front_end(address)
            for rank_id in self._ranks.living:
                self._attach_front_ends(rank_id)
        self._tell_front_ends(self._ranks.snapshot())
        if self._shutdown is not None:  # it came while this one was starting, which could not hear it
            self._control.send(front_end_identity(address.index), self._shutdown)

    def _attach_front_ends(self, rank_id: RankId) -> None:
        def tell(address: FrontEndAddress) -> bool:
            order = AttachFrontEnd(address.index, address.input_address, address.output_address)
            return self._control.send(rank_id.identity, order)

        self._ranks.tell_of_front_ends(rank_id, tell)

    def _tell_front_ends(self, message: GroupState | Shutdown | AbortElsewhere, besides: bytes | None = None) -> None:
        for index in range(len(self._front_ends)):
            if (identity := front_end_identity(index)) != besides:
                self._control.send(identity, message)  # one that is not there asks with its hello

    def _on_group_state(self, group: GroupState) -> None:
        if group.failed is None:
            self._last_death = None  # there is none left no longer: an operator has brought one back
        self._tell_front_ends(group)

    def _on_no_rank_left(self, cause: str) -> None:
        self._last_death = cause
        if not self._ranks.up.is_set():
            self._fail(cause)
        elif self._is_embedded:
            logger.error("no rank is left")  # the program around us sees `errored` and decides
        elif self._stays_up:
            logger.error("no rank is left; the server stays up, as it was told to, until an order brings one back")
        else:
            logger.error("no rank is left: ending")
            asyncio.get_running_loop().call_later(WATCHDOG_S, self._fail, cause)

    def _on_front_end_failed(self, cause: str) -> None:
        # A front end that gives up because no rank is left knows the headline only; we have the traceback.
        self._fail(self._last_death or cause)

    def _fail(self, cause: str) -> None:
        if not self.failure.done():
            self.failure.set_result(cause)

    # --- the end ---

    async def stop(self, drain_timeout_s: float) -> None:
        """Front ends, ranks, what they ran on, sockets. Bounded; each stage says so in the log."""
        failed = self.failure.done()
        self._retire()
        logger.info("stopping the front end, at most %g s", drain_timeout_s)
        self._shutdown = Shutdown(drain_timeout_s)
        self._tell_front_ends(self._shutdown)
        await self._stop_front_ends(drain_timeout_s + (FAILED_END_TIMEOUT_S if failed else DRAIN_MARGIN_S))
        self._stop_ticker()
        logger.info("stopping the ranks")
        for rank_id in self._ranks.living:
            self._control.send(rank_id.identity, Shutdown(0.0))
        await self._ranks.stop(FAILED_END_TIMEOUT_S if failed else RANK_END_TIMEOUT_S)
        await self._rank_launcher.close()
        await self._coordinator.stop()
        self._control.close()
        logger.info("stopped")

    def _retire(self) -> None:
        self._ranks.retire()
        for order in self._orders:
            order.cancel()

    def _stop_ticker(self) -> None:
        """Not before the front ends have ended: a node may be lost while they finish what they have."""
        if self._ticker is not None:
            self._ticker.cancel()

    async def _stop_front_ends(self, timeout_s: float) -> None:
        await asyncio.gather(*(front_end.stop(timeout_s) for front_end in self._front_ends))

    async def kill(self) -> None:
        """The same without asking anybody."""
        self._retire()
        self._stop_ticker()
        await self._stop_front_ends(0.0)
        await self._ranks.stop(0.0)
        await self._rank_launcher.close()
        await self._coordinator.stop()
        self._control.close()

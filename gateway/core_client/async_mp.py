"""One engine core behind ZMQ: transport, handshake, heartbeats, utility calls and the death funnel.

Theory of operation
-------------------
The client binds a ROUTER (commands out, `EngineReady` in) and a PULL (everything else in). A rank says `EngineReady` on the
ROUTER once it has loaded; from then on it is addressed by the identity of that life, so that a command for a dead life cannot
reach its successor.

Death and doubt are two things. **Proof**: the engine's own `EngineCoreDead`, or the launcher's verdict (it sees the process
end). The first proof closes the life: what has arrived is read, then `EngineDied` is queued behind it, and every later frame of
that epoch is dropped. **Suspicion**: no sign of life for three seconds. It only takes the rank out of rotation (`RankHealth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import zmq

from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.policy import Choice
from balancer.rank_health import RankHealth, RankState
from cores import messages as m
from cores.codec import CodecError, decode, encode
from cores.log import is_worth_a_line
from gateway.config import GatewayConfig
from gateway.core_client.base import (
    EngineCoreClient,
    EngineDied,
    EngineFailed,
    FrontEndPlace,
    RanksChanged,
    Received,
    SentRequest,
)
from gateway.core_client.launcher_link import LauncherLink
from gateway.core_client.rank import Rank, RankLife
from gateway.core_client.sockets import LoopSocket, ipc_address
from gateway.core_client.utility_calls import UtilityCalls, count_survivors
from gateway.embedded import EmbeddedLauncher, start_embedded_launcher
from gateway.errors import EngineDeadError, GatewayError, InvalidRequestError, OverloadedError
from gateway.event_log import EventLog
from gateway.status import RankStatus

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.25  # how often silence is looked at; an edge that ZMQ swallowed costs this at most
MAX_TICK_S = 1.0
READY_MARGIN_S = 30.0  # the launcher's own bound strikes first, with the engine's cause


class AsyncMPClient(EngineCoreClient):
    """Every request goes to the one rank of this endpoint."""

    def __init__(
        self,
        config: GatewayConfig,
        place: FrontEndPlace,
        clock: Callable[[], float] = time.monotonic,
        ledger: LoadLedger | None = None,
    ) -> None:
        self.events = EventLog()
        self.ledger = ledger or LoadLedger()
        self.num_malformed_frames = 0
        self.num_stale_frames = 0
        self.on_shutdown: Callable[[float], None] = lambda timeout_s: None  # the launcher's order; set by the front end
        self.on_bound: Callable[[int, m.RankId], None] = lambda handle, rank_id: None  # a request that waited here was sent
        self.before_serving: Callable[[m.RankId], Awaitable[None]] | None = None  # what a rank needs before it takes requests
        self._config = config
        self.place = place
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = LoopSocket(self._context, zmq.ROUTER, self._on_command_socket)
        self._outputs = LoopSocket(self._context, zmq.PULL, self._on_output_socket)
        self._link = LauncherLink(self._context, self._on_group_state, self._on_shutdown)
        self.embedded: EmbeddedLauncher | None = None
        self._ranks = {rank: Rank(self._new_life(m.RankId(rank, 0))) for rank in config.parallel.ranks}
        self._utilities = UtilityCalls()
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        self._all_ready = asyncio.Event()
        self._failure: str | None = None
        self._last_handle = 0
        self._sent: dict[int, SentRequest] = {}  # what ranks have of us, to give it to another
        self._last_eligible: set[m.RankId] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._preparations: set[asyncio.Task[None]] = set()
        self._closed = False

    # --- life of the client -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        place = self.place
        input_address = self._commands.bind(ipc_address(place.run_directory, f"fe{place.index}-in"))
        output_address = self._outputs.bind(ipc_address(place.run_directory, f"fe{place.index}-out"))
        self._commands.start()
        self._outputs.start()
        control_address = place.control_address
        if control_address is None:
            self.embedded = await start_embedded_launcher(self._config, place.run_directory)
            control_address = self.embedded.control_address
        self._link.start(control_address, place.index)
        self._link.send(m.FrontEndHello(place.index, os.getpid(), input_address, output_address))
        self._ticker = asyncio.create_task(self._tick(), name="core-client-ticker")
        self._ticker.add_done_callback(self._on_ticker_done)
        await self._wait_until_ready()

    def _on_shutdown(self, timeout_s: float) -> None:
        self.on_shutdown(timeout_s)

    async def _wait_until_ready(self) -> None:
        timeout_s = self._config.fault.engine_ready_timeout + READY_MARGIN_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ready.wait(), timeout_s)
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed to start: {self._failure}", cause=self._failure)
        if not self._all_ready.is_set():
            missing = [rank for rank, r in self._ranks.items() if r.life.ready is None]
            raise EngineDeadError(f"ranks {missing} were not ready after {timeout_s:.0f} s")

    async def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        for preparation in self._preparations:
            preparation.cancel()
        self._utilities.fail_all(EngineDeadError("the engine client was shut down"))
        try:
            if self.embedded is not None:
                await self.embedded.stop()
        finally:
            for socket in (self._commands, self._outputs, self._link):
                socket.close()
            self._context.term()

    # --- requests out -------------------------------------------------------------------------------------------------

    def next_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    def add_request(self, sent: SentRequest) -> m.RankId | None:
        # Atomic on the loop: choosing, booking and sending must not be split by an await, or a burst would choose alike.
        routing = sent.routing
        choice = self._choose(routing, self._clock())
        num_new_tokens = routing.num_prompt_tokens - choice.num_cached_tokens
        self.ledger.book(sent.request.handle, choice.rank_id, num_new_tokens, routing.block_keys)
        self._send_booked(sent, choice.rank_id)
        return choice.rank_id

    def _send_booked(self, sent: SentRequest, rank_id: m.RankId) -> None:
        """Sends what is on the books, or takes it off. Raises `EngineDeadError`."""
        request, rank = sent.request, self._ranks[rank_id.rank]
        try:
            seq = self._send(rank.life, lambda seq: m.AddRequest(seq, request))
        except BaseException:
            self.ledger.release(request.handle)
            raise
        self.ledger.on_sent(request.handle, seq)
        self._sent[request.handle] = sent
        rank.requests_total += 1
        rank.requests_moved_in += sent.num_moves > 0

    def _choose(self, routing: RoutingRequest, now: float) -> Choice:
        """The rank for a request. Overridden where there is a choice."""
        (rank,) = self._ranks.values()
        if routing.pinned_rank is not None and routing.pinned_rank != rank.life.rank_id.rank:
            raise InvalidRequestError(
                f"data_parallel_rank must be {rank.life.rank_id.rank}, the only rank here, got {routing.pinned_rank}",
                "data_parallel_rank",
            )
        if not rank.life.health.is_serving or rank.life.health.refuses_requests:
            raise self._unavailable()
        return Choice(rank.life.rank_id, "only one")

    def _unavailable(self, what: str = "no rank can take a request now") -> OverloadedError | EngineDeadError:
        if self._failure is not None:
            return EngineDeadError(f"the engine is dead: {self._failure}", cause=self._failure)
        states = ", ".join(f"rank {rank} is {r.life.health.state.value}" for rank, r in self._ranks.items())
        return OverloadedError(f"{what}: {states}")

    def abort_requests(self, handles: Collection[int]) -> None:
        by_rank: dict[m.RankId, list[int]] = {}
        for handle in handles:
            rank_id = self.ledger.rank_of(handle)
            if rank_id is not None:
                by_rank.setdefault(rank_id, []).append(handle)
        for rank_id, held in by_rank.items():
            self._abort_on(rank_id, tuple(held))
        self._on_room()

    def _abort_on(self, rank_id: m.RankId, handles: tuple[int, ...]) -> None:
        life = self._ranks[rank_id.rank].life
        abort_seq = None
        if life.rank_id == rank_id:
            with contextlib.suppress(EngineDeadError):  # a rank that is gone needs no abort
                abort_seq = self._send(life, lambda seq: m.AbortRequests(seq, handles))
        for handle in handles:
            self._release(handle, abort_seq)

    def release(self, handles: Collection[int]) -> None:
        for handle in handles:
            self._release(handle)
        self._on_room()

    def _release(self, handle: int, abort_seq: int | None = None) -> None:
        self.ledger.release(handle, abort_seq)
        self._sent.pop(handle, None)

    def _send(self, life: RankLife, command: Callable[[int], m.Command]) -> int:
        """Sends one command and returns its sequence number, which counts only if the send succeeds."""
        seq = life.last_seq + 1
        frame = encode(command(seq))
        try:
            self._commands.send([life.rank_id.identity, frame])
        except zmq.ZMQError as error:
            raise EngineDeadError(f"{life.rank_id} cannot be reached: {error}", life.rank_id.rank, str(error)) from error
        life.last_seq = seq
        return seq

    # --- utilities ----------------------------------------------------------------------------------------------------

    async def call_utility(self, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        lives = [rank.life for rank in self._ranks.values() if rank.life.health.state != RankState.DEAD]
        # Before anything is sent: one that is still starting would be left out of what the others do.
        if not lives or not all(life.health.is_serving for life in lives):
            raise self._unavailable(f"{method} needs all ranks")
        rank_ids = [life.rank_id for life in lives]
        results = await self.call_utility_on(rank_ids, method, *args, timeout_s=timeout_s)
        return {rank_id.rank: result for rank_id, result in zip(rank_ids, results, strict=True)}

    async def call_utility_on(
        self, rank_ids: Sequence[m.RankId], method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """On these only, whatever the others are doing."""

        def send(rank_id: m.RankId, command: Callable[[int], m.Command]) -> None:
            self._send(self._life_of(rank_id), command)

        return await self._utilities.call(send, rank_ids, method, args, timeout_s)

    async def tell_ranks(
        self, method: str, *args: Any, rank_ids: Sequence[m.RankId] | None = None, timeout_s: float | None = None
    ) -> int:
        rank_ids = self.serving if rank_ids is None else rank_ids
        calls = [self.call_utility_on([rank_id], method, *args, timeout_s=timeout_s) for rank_id in rank_ids]
        return count_survivors(await asyncio.gather(*calls, return_exceptions=True))

    def on_utility_result(self, result: m.UtilityResult) -> None:
        self._utilities.on_result(result)

    # --- what comes in ------------------------------------------------------------------------------------------------

    async def get_received(self) -> Received:
        return await self._received.get()

    def _decode(self, frame: bytes) -> Any:
        try:
            return decode(frame)
        except CodecError as error:
            self.num_malformed_frames += 1
            if is_worth_a_line(self.num_malformed_frames):
                logger.warning("dropped a malformed frame (%d so far): %s", self.num_malformed_frames, error)
            return None

    def _on_command_socket(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        message = self._decode(rest[-1]) if rest else None
        if not isinstance(message, m.EngineReady):
            return
        rank = self._ranks.get(message.rank_id.rank)
        # Nobody but a life itself may announce it: a newer one ends the one before.
        if rank is None or identity != message.rank_id.identity or message.rank_id.epoch < rank.life.rank_id.epoch:
            self.num_stale_frames += 1
            return
        life = self._life_for(rank, message.rank_id)
        if life.ready is not None or life.health.state == RankState.DEAD:
            self.num_stale_frames += 1
            return
        self._on_engine_ready(life, message)

    def _on_engine_ready(self, life: RankLife, ready: m.EngineReady) -> None:
        life.ready = ready
        if self.before_serving is None:
            self._begin_serving(life, ready)
        else:
            task = asyncio.create_task(self._prepare(life, ready, self.before_serving), name=f"prepare {life.rank_id}")
            self._preparations.add(task)
            task.add_done_callback(self._preparations.discard)

    async def _prepare(self, life: RankLife, ready: m.EngineReady, prepare: Callable[[m.RankId], Awaitable[None]]) -> None:
        try:
            await prepare(life.rank_id)
        except Exception as error:  # whatever it is: nobody else would ever see that this rank takes no requests
            level = logging.DEBUG if isinstance(error, GatewayError) else logging.ERROR
            logger.log(level, "%s cannot be prepared", life.rank_id, exc_info=error)
            self._declare_dead(life.rank_id, f"it could not be prepared: {error}")
        else:
            if life.health.state != RankState.DEAD:
                self._begin_serving(life, ready)

    def _begin_serving(self, life: RankLife, ready: m.EngineReady) -> None:
        now = self._clock()
        life.health.on_ready(now)
        self.ledger.add_rank(
            life.rank_id,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            max_num_seqs=ready.max_num_seqs,
            now=now,
            num_kv_blocks=ready.num_kv_blocks,
        )
        if self.ledger.prefix_index is not None:
            self._watch_cache(life)
        text = f"epoch {life.rank_id.epoch} is ready on {ready.node}, {ready.device}, pid {ready.pid}"
        self.events.add("ready", life.rank_id.rank, text, now)
        self._check_all_ready()
        self._note_eligible()

    def _watch_cache(self, life: RankLife) -> None:
        with contextlib.suppress(EngineDeadError):  # then there is nothing to watch
            self._send(life, m.WatchCache)

    def _note_eligible(self) -> None:
        """Tells the output handler when there is a rank more to choose from: something may wait for it."""
        eligible = set(self.eligible)
        if not eligible <= self._last_eligible:
            self._received.put_nowait(RanksChanged())
        self._last_eligible = eligible
        self._on_room()

    def forget_queued(self) -> None:
        """Nothing waits here."""

    def _on_room(self) -> None:
        """Something has happened that may have made room on a rank. Overridden where requests wait for it."""

    def _check_all_ready(self) -> None:
        """A rank that the launcher has given up is not waited for by a front end that starts later."""
        lives = [rank.life for rank in self._ranks.values()]
        if any(life.ready for life in lives) and all(life.ready or life.health.state == RankState.DEAD for life in lives):
            self._all_ready.set()

    def _on_output_socket(self, frames: list[bytes]) -> None:
        message = self._decode(frames[-1])
        if message is None:
            return
        rank_id = getattr(message, "rank_id", None)
        rank = self._ranks.get(rank_id.rank) if rank_id is not None else None
        if rank is None or rank_id != rank.life.rank_id or rank.life.health.state == RankState.DEAD:
            self.num_stale_frames += 1
            return
        now, life = self._clock(), rank.life
        match message:
            case m.EngineCoreOutputs():
                life.health.on_sign_of_life(now, message.step, True)
                for row in message.first_tokens:
                    self.ledger.on_first_token(message.handles[row])
                self._on_load(life, message.step, message.command_seq, message.load, now)
                self._received.put_nowait(message)
            case m.LoadReport() | m.Heartbeat():
                has_work = message.load.num_waiting + message.load.num_running > 0
                if isinstance(message, m.Heartbeat):
                    has_work = message.has_work
                    life.health.on_engine_state(message.state, now)
                    life.weight_version = message.weight_version
                    rank.on_stats(message.stats, now)
                    self._note_eligible()  # it may have been resumed
                life.health.on_sign_of_life(now, message.step, has_work)
                self._on_load(life, message.step, message.command_seq, message.load, now)
                self._note_eligible()  # it may have been resumed
            case m.CacheEvents():
                index = self.ledger.prefix_index
                if index is not None and not index.on_events(message):
                    self._watch_cache(life)
            case m.EngineCoreDead():
                self._declare_dead(message.rank_id, message.cause or "it was shut down")
            case m.UtilityResult():
                self._received.put_nowait(message)

    def _on_load(self, life: RankLife, step: int, command_seq: int, load: m.RankLoad, now: float) -> None:
        life.load, life.load_at_s = load, now
        self.ledger.on_report(life.rank_id, step, command_seq, load, now)
        self._on_room()

    # --- death and doubt ----------------------------------------------------------------------------------------------

    def _on_group_state(self, group: m.GroupState) -> None:
        now = self._clock()
        for record in group.ranks:
            rank = self._ranks.get(record.rank)
            if rank is None or record.epoch < rank.life.rank_id.epoch:
                continue
            life = self._life_for(rank, m.RankId(record.rank, record.epoch))
            rank.restarts = record.restarts
            if record.state == "dead":
                self._outputs.drain_now()  # what the rank still said comes before the news of its death
                self._declare_dead(life.rank_id, record.cause or "unknown cause", tell_launcher=False)
            life.health.on_launcher_state(record.state, now)
        self._check_all_ready()
        if group.failed is not None and self._failure is None:
            self._failure = group.failed
            self._received.put_nowait(EngineFailed(group.failed))
            self._all_ready.set()

    def _declare_dead(self, rank_id: m.RankId, cause: str, *, tell_launcher: bool = True) -> None:
        """The one way into death. The first proof counts."""
        rank = self._ranks[rank_id.rank]
        if rank.life.rank_id != rank_id or rank.life.health.state == RankState.DEAD:
            return
        now, headline = self._clock(), cause.partition("\n")[0]
        rank.life.health.on_dead(now, headline)
        rank.on_death(headline, now)
        text = f"died with {len(self.ledger.handles_on(rank_id))} requests in flight: {headline}"
        self.events.add("death", rank_id.rank, f"epoch {rank_id.epoch} {text}", now)
        logger.log(logging.INFO if self._closed else logging.ERROR, "%s %s", rank_id, text)
        self._received.put_nowait(EngineDied(rank_id, headline))
        if tell_launcher:
            self._link.send(m.RankDied(rank_id, headline))

    def on_engine_died(self, died: EngineDied) -> list[SentRequest]:
        self._utilities.on_engine_died(died.rank_id, died.cause)
        return [self._sent.pop(handle) for handle in self.ledger.remove_rank(died.rank_id)]

    def note_moved(self, died: EngineDied, num_moved: int, num_lost: int) -> None:
        """For the counters and the event log."""
        self._ranks[died.rank_id.rank].requests_moved_away += num_moved
        if num_moved:
            lost = f", {num_lost} failed" if num_lost else ""
            text = f"{num_moved} requests of epoch {died.rank_id.epoch} go on elsewhere{lost}"
            self.events.add("move", died.rank_id.rank, text, self._clock())

    def _life_of(self, rank_id: m.RankId) -> RankLife:
        """Raises `EngineDeadError` when that life is over."""
        life = self._ranks[rank_id.rank].life
        if life.rank_id != rank_id or life.health.state == RankState.DEAD:
            raise EngineDeadError(f"{rank_id} died", rank_id.rank, self._ranks[rank_id.rank].death_cause)
        return life

    def _life_for(self, rank: Rank, rank_id: m.RankId) -> RankLife:
        """The rank's life of that epoch; a newer epoch than known begins one, and ends the older if nobody said so."""
        if rank_id.epoch > rank.life.rank_id.epoch:
            if rank.life.ready is not None:
                self._declare_dead(rank.life.rank_id, "it was replaced", tell_launcher=False)
            if rank.life.rank_id.epoch:  # 0 stands for what was before the first
                self.events.add("restart", rank_id.rank, f"epoch {rank_id.epoch} begins", self._clock())
            rank.begin_life(self._new_life(rank_id))
        return rank.life

    def _new_life(self, rank_id: m.RankId) -> RankLife:
        health = RankHealth(rank_id, self._clock(), stall_timeout_s=self._config.fault.stall_timeout)
        # The rank's first reports to a front end that has started again may still count its predecessor's commands. They must
        # not pass for ours: every life has numbers of its own.
        return RankLife(rank_id, health, last_seq=self.place.life << 32)

    async def _tick(self) -> None:
        looked_s, was_late = self._clock(), False
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self._link.poke()
            self._outputs.poke()
            self._commands.poke()
            now = self._clock()
            # A pause of our own proves nothing about ranks: what they said meanwhile is still to be read, once.
            was_late = now - looked_s >= MAX_TICK_S and not was_late
            if not was_late:
                for rank in self._ranks.values():
                    self._check_silence(rank.life, now)
            looked_s = now
            self._note_eligible()
            if self.embedded is not None and self.embedded.exit_code is not None and self._failure is None:
                self._fail(f"the launcher ended with exit code {self.embedded.exit_code}")

    def _on_ticker_done(self, task: asyncio.Task[None]) -> None:
        """Without it a silent rank would look alive for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the core client's ticker ended", exc_info=error)
            self._fail(f"the core client's ticker ended: {error!r}")

    def _fail(self, cause: str) -> None:
        for rank in self._ranks.values():
            self._declare_dead(rank.life.rank_id, cause, tell_launcher=False)
        self._failure = cause
        self._received.put_nowait(EngineFailed(cause))
        self._all_ready.set()

    def _check_silence(self, life: RankLife, now: float) -> None:
        state = life.health.on_timer(now, has_own_work=bool(self.ledger.handles_on(life.rank_id)))
        if state is RankState.SUSPECT:
            silent_s = life.health.last_seen_s(now)
            logger.warning("%s is suspect: nothing heard for %.1f s", life.rank_id, silent_s)
            self._link.send(m.RankSuspected(life.rank_id, silent_s))
        elif state is RankState.STALLED:
            text = f"stalled: it has work and made no step for {life.health.last_progress_s(now):.1f} s"
            logger.warning("%s %s", life.rank_id, text)
            self.events.add("stall", life.rank_id.rank, f"epoch {life.rank_id.epoch} {text}", now)
            self._link.send(m.RankStalled(life.rank_id, text))

    # --- what it looks like -------------------------------------------------------------------------------------------

    @property
    def eligible(self) -> list[m.RankId]:
        """The ready ranks. Where there is none, those that are only silent: most likely they are slow, and if not, failover
        takes back what they get."""
        lives = [rank.life for rank in self._ranks.values()]
        ready = [life.rank_id for life in lives if life.health.is_eligible]
        return ready or [life.rank_id for life in lives if life.health.state is RankState.SUSPECT]

    @property
    def serving(self) -> list[m.RankId]:
        return [rank.life.rank_id for rank in self._ranks.values() if rank.life.health.is_serving]

    def set_missing_loras(self, rank_id: m.RankId, missing: dict[str, str]) -> None:
        """The adapters, by name, that this life of a rank could not load, and why."""
        life = self._ranks[rank_id.rank].life
        if life.rank_id == rank_id:
            life.missing_loras = missing

    def eligible_for(self, lora_name: str | None) -> list[m.RankId]:
        """Those that have the adapter. If none has it, all: the engine says why."""
        eligible = self.eligible
        if lora_name is None:
            return eligible
        return [rank_id for rank_id in eligible if lora_name not in self._ranks[rank_id.rank].life.missing_loras] or eligible

    @property
    def ready_messages(self) -> Sequence[m.EngineReady]:
        return [rank.life.ready for rank in self._ranks.values() if rank.life.ready is not None]

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def awaits_restart(self) -> bool:
        is_serving = any(rank.life.health.is_serving for rank in self._ranks.values())
        return not is_serving and self._failure is None and self._config.fault.engine_restarts > 0

    @property
    def link(self) -> LauncherLink:
        return self._link

    @property
    def standstill(self) -> str | None:
        states = {rank.life.health.state for rank in self._ranks.values()}
        if RankState.READY in states:
            return None
        return next((s.value for s in (RankState.SLEEPING, RankState.PAUSED, RankState.DRAINING) if s in states), None)

    @property
    def num_reported_tokens(self) -> int:
        return sum(rank.life.load.num_prefill_tokens for rank in self._ranks.values() if rank.life.health.is_eligible)

    @property
    def num_unreported_tokens(self) -> int:
        return self.ledger.num_unreported_tokens

    def rank_statuses(self, now: float) -> list[RankStatus]:
        return [rank.status(now, self.ledger.booked_tokens(rank.life.rank_id)) for rank in self._ranks.values()]

    def group_status(self, now: float) -> tuple[dict[str, Any], ...]:
        """What is known of the group's other endpoints. Only an external load balancer has any."""
        return ()

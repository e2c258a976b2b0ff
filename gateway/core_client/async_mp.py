"""Engine cores behind ZMQ: requests and calls go out, outputs, loads and signs of life come in. What follows of them for the
ranks is in `ranks`, what they travel over in `rank_link`.

All that the output handler is to know goes through one queue, in the order in which it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import zmq

from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.policy import Choice
from balancer.rank_health import RankState
from cores import messages as m
from cores.codec import Message
from cores.control_messages import FrontEndHello
from cores.curve import GroupKey
from cores.words import counted
from gateway.config import GatewayConfig
from gateway.core_client.aborts_elsewhere import AbortsElsewhere
from gateway.core_client.base import (
    EngineCoreClient,
    EngineDied,
    FrontEndPlace,
    Received,
    SentRequest,
)
from gateway.core_client.group_view import GroupView
from gateway.core_client.launcher_link import LauncherLink
from gateway.core_client.orders import Orders
from gateway.core_client.rank import RankLife
from gateway.core_client.rank_link import RankLink
from gateway.core_client.ranks import Ranks
from gateway.core_client.utility_calls import UtilityCalls, count_survivors, left_behind
from gateway.embedded import EmbeddedLauncher, start_embedded_launcher
from gateway.errors import EngineDeadError, InvalidRequestError
from gateway.event_log import EventLog, make_event_log
from gateway.status import RankStatus

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.25  # how often silence is looked at; an edge that ZMQ swallowed costs this at most
MAX_TICK_S = 1.0
UNREACHABLE_S = 1.0  # the launcher has the better cause of a process's end, and knows it after 0.1 s
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
        self.ledger = ledger or LoadLedger()
        self.num_stale_frames = 0
        self.on_shutdown: Callable[[float], None] = lambda timeout_s: None  # the launcher's order; set by the front end
        self.on_bound: Callable[[int, m.RankId], None] = lambda handle, rank_id: None  # a request that waited here was sent
        self._config = config
        self.place = place
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._rank_link = RankLink(self._context, self._on_first_word, self._on_message, self._on_lost)
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        self.ranks = Ranks(
            config, place.index, place.life, self.ledger, clock,
            put=self._received.put_nowait, tell_launcher=self._tell_launcher, read_all=self._rank_link.read_all,
            on_serving=self._on_serving, events=make_event_log(place.shared_directory),
        )  # fmt: skip
        self._orders = Orders(self._tell_launcher)
        self.aborts = AbortsElsewhere(self._tell_launcher, place.index, config.server.api_server_count - 1)
        self.link = LauncherLink(
            self._context, self.ranks.on_group_state, self._on_shutdown, self.aborts.on_message, self._orders.on_done
        )
        self._group: GroupView | None = None
        if config.parallel.has_others:
            self._group = GroupView(config.parallel, self._context, place.url, self.ranks.report, clock)
        self.embedded: EmbeddedLauncher | None = None
        self._utilities = UtilityCalls()
        self._last_handle = 0
        self._sent: dict[int, SentRequest] = {}  # what ranks have of us, to give it to another
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False

    # --- life of the client -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._group is not None:
            self._group.start()
        place = self.place
        control_address, transport = place.control_address, place.transport
        if control_address is None:
            self.embedded = await start_embedded_launcher(self._config, place.run_directory)
            control_address, transport = self.embedded.control_address, self.embedded.transport
        addresses = self._rank_link.start(place.run_directory, place.index, transport)
        self.link.start(control_address, place.index, GroupKey.of(transport))
        self.link.send(FrontEndHello(place.index, os.getpid(), *addresses))
        self._ticker = asyncio.create_task(self._tick(), name="core-client-ticker")
        self._ticker.add_done_callback(self._on_ticker_done)
        await self._wait_until_ready()

    def _tell_launcher(self, message: Message) -> None:
        self.link.send(message)

    def _on_shutdown(self, timeout_s: float) -> None:
        self.on_shutdown(timeout_s)

    async def _wait_until_ready(self) -> None:
        timeout_s = self._config.fault.engine_ready_timeout + READY_MARGIN_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ranks.all_ready.wait(), timeout_s)
        if (failure := self.failure) is not None:
            raise EngineDeadError(f"the engine failed to start: {failure}", cause=failure)
        if not self.ranks.all_ready.is_set():
            missing = [life.rank_id.rank for life in self.ranks.lives if life.ready is None]
            raise EngineDeadError(f"ranks {missing} were not ready after {timeout_s:.0f} s")

    async def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        if self._group is not None:
            self._group.close()
        self._orders.fail_all(EngineDeadError("the engine client was shut down"))
        self.ranks.close()
        self._utilities.fail_all(EngineDeadError("the engine client was shut down"))
        try:
            if self.embedded is not None:
                await self.embedded.stop()
        finally:
            self._rank_link.close()
            self.link.close()
            self._context.term()

    # --- requests out -------------------------------------------------------------------------------------------------

    def next_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    def add_request(self, sent: SentRequest) -> m.RankId | None:
        # Atomic on the loop: choosing, booking and sending must not be split by an await, or a burst would choose alike.
        routing = sent.routing
        choice = self._choose(routing, self._clock())
        num_new_tokens, new_keys = routing.new_on(choice.rank_id)
        self.ledger.book(sent.request.handle, choice.rank_id, num_new_tokens, new_keys)
        self._send_booked(sent, choice.rank_id)
        return choice.rank_id

    def _send_booked(self, sent: SentRequest, rank_id: m.RankId) -> None:
        """Sends what is on the books, or takes it off. Raises `EngineDeadError`."""
        request, rank = sent.request, self.ranks[rank_id.rank]
        try:
            seq = self._send(rank.life, lambda seq: m.AddRequest(seq, request))
        except BaseException:
            self.ledger.release(request.handle)
            raise
        self.ledger.on_sent(request.handle, seq)
        self._sent[request.handle] = sent
        rank.requests_total += 1
        rank.requests_moved_in += sent.has_moved

    def _choose(self, routing: RoutingRequest, now: float) -> Choice:
        """The rank for a request. Overridden where there is a choice."""
        (rank,) = self.ranks
        if routing.pinned_rank is not None and routing.pinned_rank != rank.life.rank_id.rank:
            raise InvalidRequestError(
                f"data_parallel_rank must be {rank.life.rank_id.rank}, the only rank here, got {routing.pinned_rank}",
                "data_parallel_rank",
            )
        health = rank.life.health
        if not health.is_serving or health.refuses_requests or health.state is RankState.DRAINING:
            raise self.ranks.unavailable()
        return Choice(rank.life.rank_id, "only one")

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
        rank, abort_seq = self.ranks.find(rank_id.rank), None
        if rank is not None and (life := rank.life).rank_id == rank_id:
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
        try:
            return self._rank_link.send(life, command)
        except EngineDeadError:
            if life.unreachable_s is None:
                life.unreachable_s = self._clock()
            raise

    # --- utilities ----------------------------------------------------------------------------------------------------

    async def call_utility(self, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        lives = [life for life in self.ranks.lives if life.health.state != RankState.DEAD]
        # Before anything is sent: one that is still starting would be left out of what the others do.
        if not lives or not all(life.health.is_serving for life in lives):
            raise self.ranks.unavailable(f"{method} needs all ranks")
        rank_ids = [life.rank_id for life in lives]
        results = await self.call_utility_on(rank_ids, method, *args, timeout_s=timeout_s)
        return {rank_id.rank: result for rank_id, result in zip(rank_ids, results, strict=True)}

    async def order(self, action: str, *, rank: int = 0, size: int = 0, drain_timeout_s: float = 0.0) -> None:
        if self._closed or (self.embedded is not None and self.embedded.exit_code is not None):
            raise EngineDeadError("there is no launcher any more that could carry out an order")
        await self._orders.give(action, rank, size, drain_timeout_s)
        # The launcher's word of a rank may be here before the rank's own: what is asked next is to find it as ordered.
        await self.ranks.until_heard(READY_MARGIN_S)

    async def call_utility_on(
        self, rank_ids: Sequence[m.RankId], method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """On these only, whatever the others are doing."""

        def send(rank_id: m.RankId, command: Callable[[int], m.Command]) -> None:
            self._send(self.ranks.life_of(rank_id), command)

        return await self._utilities.call(send, rank_ids, method, args, timeout_s)

    async def tell_ranks(
        self,
        method: str,
        *args: Any,
        rank_ids: Sequence[m.RankId] | None = None,
        timeout_s: float | None = None,
        insist: bool = False,
    ) -> int:
        rank_ids = self.serving if rank_ids is None else rank_ids
        calls = [self.call_utility_on([rank_id], method, *args, timeout_s=timeout_s) for rank_id in rank_ids]
        results = dict(zip(rank_ids, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for rank_id, error in left_behind(results).items() if insist else ():
            self.ranks.declare_dead(rank_id, f"it did not do what others did: {error}")
            del results[rank_id]
        return count_survivors(list(results.values()))

    def on_utility_result(self, result: m.UtilityResult) -> None:
        self._utilities.on_result(result)

    # --- what comes in ------------------------------------------------------------------------------------------------

    async def get_received(self) -> Received:
        return await self._received.get()

    def _on_first_word(self, identity: bytes, ready: m.EngineReady) -> None:
        if not self.ranks.on_engine_ready(identity, ready):
            self.num_stale_frames += 1

    def _on_lost(self, rank_id: m.RankId, num_messages: int) -> None:
        """Tokens may be missing: what the rank was doing for us is done again from where we know it, by another."""
        self.ranks.declare_dead(rank_id, f"{counted(num_messages, 'message')} of it got lost: its connection broke")

    def _on_serving(self, life: RankLife) -> None:
        """A rank takes requests from now on."""
        if self.ledger.prefix_index is not None:
            self._watch_cache(life)
        self._on_room()

    def _watch_cache(self, life: RankLife) -> None:
        with contextlib.suppress(EngineDeadError):  # then there is nothing to watch
            self._send(life, m.WatchCache)

    def _note_eligible(self) -> None:
        self.ranks.note_eligible()
        self._on_room()

    def forget_queued(self) -> None:
        """Nothing waits here."""

    def _on_room(self) -> None:
        """Something has happened that may have made room on a rank. Overridden where requests wait for it."""

    def _note_tokens(self, outputs: m.EngineCoreOutputs) -> None:
        """Overridden where somebody counts what a tenant gets."""

    def _on_message(self, message: Message) -> None:
        rank = self.ranks.living(getattr(message, "rank_id", None))
        if rank is None:
            self.num_stale_frames += 1
            return
        now, life = self._clock(), rank.life
        match message:
            case m.EngineCoreOutputs():
                self._received.put_nowait(message)  # first: an error in the books must cost no token
                life.health.on_sign_of_life(now, message.step, True)
                for row in message.first_tokens:
                    self.ledger.on_first_token(message.handles[row])
                self._note_tokens(message)
                self._on_load(life, message.step, message.command_seq, message.load, now)
            case m.LoadReport() | m.Heartbeat():
                has_work = message.load.num_waiting + message.load.num_running > 0
                if isinstance(message, m.Heartbeat):
                    has_work = message.has_work
                    life.health.on_engine_state(message.state, now)
                    life.weight_version = message.weight_version
                    rank.on_stats(message.stats, now)
                life.health.on_sign_of_life(now, message.step, has_work)
                self._on_load(life, message.step, message.command_seq, message.load, now, message.load_age_s)
                self._note_eligible()  # it may have been resumed
            case m.CacheEvents():
                index = self.ledger.prefix_index
                if index is not None and not index.on_events(message):
                    self._watch_cache(life)
            case m.EngineCoreDead():
                self.ranks.declare_dead(message.rank_id, message.cause or "it was shut down")
            case m.UtilityResult():
                self._received.put_nowait(message)

    def _on_load(self, life: RankLife, step: int, command_seq: int, load: m.RankLoad, now: float, age_s: float = 0.0) -> None:
        life.load, life.load_at_s = load, now - age_s
        life.commands_seen.on_report(command_seq)
        self.ledger.on_report(life.rank_id, step, command_seq, load, now)
        self._on_room()

    def on_engine_died(self, died: EngineDied) -> list[SentRequest]:
        self._utilities.on_engine_died(died.rank_id, died.cause)
        is_removed = self.ranks.find(died.rank_id.rank) is None
        return [self._sent.pop(handle) for handle in self.ledger.remove_rank(died.rank_id, for_good=is_removed)]

    # --- the clockwork ------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        looked_s, was_late = self._clock(), False
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.link.poke()
            self._rank_link.poke()
            now = self._clock()
            # A pause of our own proves nothing about ranks: what they said meanwhile is still to be read, once.
            was_late = now - looked_s >= MAX_TICK_S and not was_late
            if not was_late:
                self.ranks.look_for_silence(now)
            looked_s = now
            self._look_for_broken_lines(now)
            self._note_eligible()
            self.ranks.tell_idle()
            if self.embedded is not None and self.embedded.exit_code is not None and self.failure is None:
                cause = f"the launcher ended with exit code {self.embedded.exit_code}"
                self.ranks.fail(cause)
                self._orders.fail_all(EngineDeadError(cause, cause=cause))  # nobody will answer them

    def _look_for_broken_lines(self, now: float) -> None:
        for life in self.ranks.lives:
            if life.unreachable_s is not None and now - life.unreachable_s >= UNREACHABLE_S:
                # Its process may live, but what we could not send, aborts among it, it will never know.
                self.ranks.declare_dead(life.rank_id, "it cannot be reached: its connection broke")
            elif life.health.is_serving and life.commands_seen.is_time_to_ask(life.last_seq, now):
                with contextlib.suppress(EngineDeadError):
                    self._send(life, lambda seq: m.AbortRequests(seq, ()))

    def _on_ticker_done(self, task: asyncio.Task[None]) -> None:
        """Without it a silent rank would look alive for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the core client's ticker ended", exc_info=error)
            self.ranks.fail(f"the core client's ticker ended: {error!r}")

    # --- what it looks like -------------------------------------------------------------------------------------------

    @property
    def num_malformed_frames(self) -> int:
        return self._rank_link.num_malformed

    @property
    def events(self) -> EventLog:
        return self.ranks.events

    @property
    def eligible(self) -> list[m.RankId]:
        return self.ranks.eligible

    @property
    def serving(self) -> list[m.RankId]:
        return self.ranks.serving

    def set_missing_loras(self, rank_id: m.RankId, missing: dict[str, str]) -> None:
        """The adapters, by name, that this life of a rank could not load, and why."""
        rank = self.ranks.find(rank_id.rank)
        if rank is not None and (life := rank.life).rank_id == rank_id:
            life.missing_loras = missing

    @property
    def ready_messages(self) -> Sequence[m.EngineReady]:
        return [life.ready for life in self.ranks.lives if life.ready is not None]

    @property
    def failure(self) -> str | None:
        return self.ranks.failure

    @property
    def awaits_restart(self) -> bool:
        return self.ranks.awaits_restart

    @property
    def standstill(self) -> str | None:
        return self.ranks.standstill

    @property
    def standstill_cause(self) -> str:
        return self.ranks.standstill_cause

    @property
    def num_reported_tokens(self) -> int:
        return self.ranks.num_reported_tokens

    @property
    def num_unreported_tokens(self) -> int:
        return self.ledger.num_unreported_tokens

    def rank_statuses(self, now: float) -> list[RankStatus]:
        return self.ranks.statuses(now)

    def group_status(self, now: float) -> tuple[dict[str, Any], ...]:
        """What is known of the group's ranks, here and behind other endpoints. Nothing where there are no others."""
        return () if self._group is None else self._group.status(now)

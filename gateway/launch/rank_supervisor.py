"""Runs the ranks: starts each, waits for its ready message, sees its death, gives it its next life. `GroupLedger` decides;
this is the shell of tasks, processes and clocks around it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cores.config import FrontEndAddress
from cores.control_messages import EngineAlive, EngineStarting, GroupState, RankDied, RankStalled, RankSuspected
from cores.launch.interface import LaunchError, RankHandle, RankLauncher
from cores.messages import EngineCoreDead, EngineReady, RankId
from gateway.launch.group_ledger import GivenUp, GroupLedger, OrderError, Removed, Restart, StartFailed, Verdict
from gateway.launch.rank_plan import RankPlan

logger = logging.getLogger(__name__)

# A process that ends by itself says why on the control socket first. Its end can be seen before its words are read.
LAST_WORDS_S = 0.2
# What a core that has announced its death may take to flush its outputs and go.
ENDING_S = 5.0
# Without a sign of a rank, nor of its node: nobody waits for them any more. Both, as a rank may be slow and a node's Ray busy.
LOST_NODE_S = 2.0
NODE_IN_DOUBT_S = 0.75  # it has left a question unanswered
UNASKED_END = "it ended without being asked to"


@dataclass(slots=True)
class _Life:
    """What is known of a rank's present life. `death` is set by the first proof, with the cause."""

    rank_id: RankId
    heard_s: float  # when it last said something; in the beginning, when that was
    handle: RankHandle | None = None
    watcher: asyncio.Task[None] | None = None
    front_ends: dict[int, FrontEndAddress] = field(default_factory=dict)  # that it knows, by index
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_stuck: bool = False  # it will not end by itself
    is_node_lost: bool = False  # what it died of, if it died
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # an operator wants its successor at once
    idle_at: set[int] = field(default_factory=set)  # front ends that have no request on it, and send none, while it drains
    death: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    is_booked: bool = False  # the ledger knows of its death, and this follows from it:
    verdict: Verdict | None = None

    def prove_death(self, cause: str) -> None:
        if not self.death.done():
            self.death.set_result(cause)

    def on_watcher_done(self, watcher: asyncio.Task[None]) -> None:
        """One that nobody watches could be dead for ever without being missed."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self.prove_death(f"its process cannot be watched any more: {type(error).__name__}: {error}")


class RankSupervisor:
    """`on_change` gets the whole state after every change; `on_no_rank_left` the last cause, when no rank will come back."""

    def __init__(
        self,
        ledger: GroupLedger,
        launcher: RankLauncher,
        on_change: Callable[[GroupState], None],
        on_no_rank_left: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._launcher = launcher
        self._on_change = on_change
        self._on_no_rank_left = on_no_rank_left
        self._sleep = sleep
        self._clock = clock
        self._plan: RankPlan | None = None
        self._lives: dict[int, _Life] = {}
        self._tasks: dict[int, asyncio.Task[str]] = {}  # by rank
        self._revenants: dict[int, RankId] = {}  # by rank: the last life that spoke after its end
        self._burials: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # replaced by a new one at every change
        self._retired = False
        self.up = asyncio.Event()  # every rank has been ready once

    @property
    def living(self) -> list[RankId]:
        return [life.rank_id for life in self._lives.values() if not life.death.done()]

    def start(self, plan: RankPlan, ranks: tuple[int, ...]) -> None:
        """All ranks at once."""
        self._plan = plan
        for rank in ranks:
            self._begin_task(rank)

    def _begin_task(self, rank: int) -> None:
        task = self._tasks[rank] = asyncio.create_task(self._run_rank(rank), name=f"rank {rank}")
        task.add_done_callback(functools.partial(self._on_task_done, rank))

    def _on_task_done(self, rank: int, task: asyncio.Task[str]) -> None:
        """An error of ours costs the rank that nobody watches any more, and no other."""
        self._note_change()
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.critical("rank %d cannot be supervised any more", rank, exc_info=error)
        self._ledger.give_up(rank, f"it cannot be supervised any more: {type(error).__name__}: {error}")
        self._publish()
        if (life := self._lives.get(rank)) is not None and life.handle is not None:
            self._burials.append(asyncio.create_task(life.handle.kill(), name=f"end of rank {rank}"))
        if self._ledger.failed is not None:
            self._on_no_rank_left(self._ledger.failed)

    @property
    def is_started(self) -> bool:
        return self._plan is not None

    def replace_front_end(self, address: FrontEndAddress) -> None:
        """A front end has a new life. Ranks that start from now on know it; the others are to be told."""
        assert self._plan is not None
        others = tuple(other for other in self._plan.front_ends if other.index != address.index)
        self._plan = dataclasses.replace(self._plan, front_ends=(*others, address))

    def tell_of_front_ends(self, rank_id: RankId, tell: Callable[[FrontEndAddress], bool]) -> None:
        """Tells a rank of the front ends that it does not know, each once. `tell` returns whether the rank heard it: one that
        is just being started does not yet, and is told after its first message."""
        life = self._lives.get(rank_id.rank)
        if self._plan is None or life is None or life.rank_id != rank_id:
            return
        for address in self._plan.front_ends:
            if life.front_ends.get(address.index) != address and tell(address):
                life.front_ends[address.index] = address

    def snapshot(self) -> GroupState:
        return self._ledger.snapshot()

    # --- what others say ---

    def on_message(
        self, message: EngineStarting | EngineReady | EngineAlive | EngineCoreDead | RankDied | RankSuspected | RankStalled
    ) -> None:
        life = self._lives.get(message.rank_id.rank)
        if life is None or life.rank_id != message.rank_id:
            return  # of a life that is over
        if isinstance(message, EngineStarting | EngineReady | EngineAlive):
            life.heard_s = self._clock()
        match message:
            case EngineStarting(text=text, pid=pid, progress=progress):
                if progress:
                    self._ledger.on_progress(message.rank_id, progress)
                    self._publish()
                else:
                    node = life.handle.node if life.handle is not None else "a node that is not known yet"
                    logger.info("%s on %s, pid %d: %s", message.rank_id, node, pid, text)
            case EngineReady(node=node, device=device):
                logger.info("%s is ready on %s, %s", message.rank_id, node, device)
                life.ready.set()
            case EngineCoreDead(cause=cause):
                life.prove_death(cause or UNASKED_END)
            case RankDied(cause=cause):
                life.prove_death(cause)
            case RankStalled(cause=cause):
                life.is_stuck = True
                life.prove_death(cause)
            case RankSuspected(silent_s=silent_s):
                logger.warning("%s has been silent for %.1f s", message.rank_id, silent_s)

    def is_over(self, rank_id: RankId) -> bool:
        """Somebody who says that he is this life must end: it has been declared dead, and another one may serve already."""
        life = self._lives.get(rank_id.rank)
        return life is None or life.rank_id != rank_id or life.death.done()

    def note_revenant(self, rank_id: RankId) -> None:
        """One line for each such life, however much it has to say: what piled up on a broken line comes all at once."""
        # At the end of the endpoint a rank's last sign of life may come behind its last words: that is no news.
        if self._revenants.get(rank_id.rank) != rank_id and not self._retired:
            self._revenants[rank_id.rank] = rank_id
            logger.warning("%s was declared dead and speaks: told to end", rank_id)

    def look_for_lost_nodes(self, now: float) -> None:
        """A node that is gone says so as little as the ranks on it. Ray will notice, but takes 15 s. `now` is our clock's."""
        by_node: dict[str, list[tuple[_Life, float]]] = {}
        for life in self._lives.values():
            if life.handle is not None and not life.death.done():
                silent_s = min(now - life.heard_s, life.handle.node_silent_s)
                by_node.setdefault(life.handle.node_id, []).append((life, silent_s))
        for lives in by_node.values():
            silent_s = min(silent_s for _, silent_s in lives)
            if silent_s >= LOST_NODE_S:
                node = next(life.handle.node for life, _ in lives if life.handle is not None)
                logger.error("node %s is gone: nothing was heard of it or its ranks for %.1f s", node, silent_s)
                cause = f"node {node} is gone: nothing was heard of it or its ranks for {silent_s:.1f} s"
                for life, _ in lives:
                    life.is_stuck = life.is_node_lost = True  # nobody is there whose end could be waited for
                    life.prove_death(cause)
                    self._book_death(life, cause)
                # All in one snapshot: else the first one's requests would go on at the second, which is as dead, and so on.
                self._publish()

    # --- one rank ---

    async def _run_rank(self, rank: int) -> str:
        """All its lives. Returns the cause of the last death."""
        cause = ""
        while not self._retired:
            rank_id = self._ledger.begin(rank)
            life = self._lives[rank] = _Life(rank_id, self._clock())
            self._publish()
            cause = await self._live(life)
            verdict = self._book_death(life, cause)
            self._publish()  # before the burial: requests must not wait for a process that takes its time to go
            self._judge(rank_id, cause, verdict)
            await self._bury(life)
            if isinstance(verdict, Removed):
                del self._lives[rank]
            if not isinstance(verdict, Restart):
                break
            await self._wait_for_next_life(life, verdict.delay_s)
        return cause

    async def _wait_for_next_life(self, life: _Life, delay_s: float) -> None:
        waits = {asyncio.ensure_future(self._sleep(delay_s)), asyncio.create_task(life.hurry.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _book_death(self, life: _Life, cause: str) -> Verdict | None:
        """Once for each life, whoever is first."""
        if not life.is_booked:
            life.is_booked = True
            life.verdict = self._ledger.on_death(life.rank_id, cause, self._clock(), is_node_lost=life.is_node_lost)
        return life.verdict

    async def _live(self, life: _Life) -> str:
        """One life, from the start of its process to the first proof of its death. Returns the cause."""
        assert self._plan is not None
        launch = self._plan.launch(life.rank_id)
        life.front_ends = {address.index: address for address in launch.front_ends}
        try:
            life.handle = await self._launcher.start(launch)
        except LaunchError as error:
            return str(error)
        except Exception as error:  # no thread, no file left, a bug: it may start the next time, as its budget allows
            logger.exception("%s could not be started", life.rank_id)
            return f"it could not be started: {type(error).__name__}: {error}"
        life.watcher = asyncio.create_task(self._watch_process(life.handle, life))
        life.watcher.add_done_callback(life.on_watcher_done)
        self._ledger.on_process(life.rank_id, life.handle.pid)
        self._publish()
        if await self._becomes_ready(life, self._plan.ready_timeout_s):
            self._ledger.on_ready(life.rank_id)
            self._publish()
            if self._ledger.was_up:
                self.up.set()
        return await life.death

    @staticmethod
    async def _becomes_ready(life: _Life, timeout_s: float) -> bool:
        waiter = asyncio.create_task(life.ready.wait())
        first: set[asyncio.Future[Any]] = {waiter, life.death}
        try:
            await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if not life.ready.is_set():
            life.prove_death(f"{life.rank_id} was not ready within {timeout_s:g} s")
        return not life.death.done()

    @staticmethod
    async def _watch_process(handle: RankHandle, life: _Life) -> None:
        end = await handle.wait()
        if not end.abrupt:
            await asyncio.sleep(LAST_WORDS_S)
        elif handle.node_silent_s >= NODE_IN_DOUBT_S:
            # Its node is on its way out, and the other ranks there with it: they are to be declared dead together.
            await asyncio.wait({life.death}, timeout=LOST_NODE_S)
        life.is_node_lost = life.is_node_lost or (end.is_node_lost and not life.death.done())
        life.prove_death(end.cause or UNASKED_END)

    @staticmethod
    async def _bury(life: _Life) -> None:
        """Returns when the process is gone: two lives of one rank must not overlap on its GPU."""
        if life.handle is None or life.watcher is None:
            return
        if not life.is_stuck:
            await asyncio.wait({life.watcher}, timeout=ENDING_S)
        await life.handle.kill()

    def _publish(self) -> None:
        self._on_change(self.snapshot())
        self._note_change()

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _judge(self, rank_id: RankId, cause: str, verdict: Verdict | None) -> None:
        """One line: the traceback, if there is one, stands under the engine's own name above."""
        if self._retired:
            return
        cause = cause.partition("\n")[0]
        match verdict:
            case Restart(delay_s=0.0):
                logger.info("%s ended, its next life begins: %s", rank_id, cause)
            case Restart(delay_s=delay_s):
                logger.error("%s died, its next life begins in %g s: %s", rank_id, delay_s, cause)
            case StartFailed():
                logger.error("%s died while the group was starting", rank_id)
            case GivenUp():
                logger.error("%s died and stays dead: %s", rank_id, cause)
            case Removed():
                logger.info("%s is gone: %s", rank_id, cause)
        if self._ledger.failed is not None:
            self._on_no_rank_left(self._ledger.failed)

    # --- orders of an operator: each raises `OrderError` for what cannot be done ---

    @property
    def ledger(self) -> GroupLedger:
        return self._ledger

    def drain(self, rank: int) -> None:
        self._ledger.drain(rank)
        self._publish()

    def undrain(self, rank: int) -> None:
        self._ledger.undrain(rank)
        self._lives[rank].idle_at.clear()
        self._publish()

    def on_idle(self, index: int, rank_id: RankId) -> None:
        life = self._lives.get(rank_id.rank)
        if life is not None and life.rank_id == rank_id:
            life.idle_at.add(index)
            self._note_change()

    async def restart(self, rank: int, drain_timeout_s: float) -> None:
        """Returns when its next life is ready. One that has died already gets it at once, or has it."""
        epoch = self._ledger.epoch(rank) + (self._ledger.state(rank) != "restarting")
        if self._ledger.is_down(rank):
            self._ledger.revive(rank)
            self._begin_task(rank)
        elif self._ledger.state(rank) == "dead":
            self._lives[rank].hurry.set()
        elif self._ledger.state(rank) != "restarting":
            self._ledger.leave(rank, "restart")
            await self._end_when_idle(rank, "restarted by an operator", drain_timeout_s)
        ends = ("ready", "draining", "dead")
        await self._until(lambda: self._ledger.epoch(rank) >= epoch and self._ledger.state(rank) in ends)
        if self._ledger.state(rank) == "dead":
            raise OrderError(f"rank {rank} ended and did not come back: {self._ledger.cause(rank)}", "failed")

    async def add(self, rank: int) -> None:
        """Returns when it is ready."""
        self._ledger.add(rank)
        self._begin_task(rank)
        task = self._tasks[rank]
        ledger = self._ledger
        # Done alone is not enough: what an error of ours leaves of the rank is given up a moment later.
        await self._until(lambda: ledger.is_ready(rank) or (task.done() and (rank not in ledger.ranks or ledger.is_down(rank))))
        if task.done():
            if rank in ledger.ranks:
                self._forget(rank)
            raise OrderError(f"rank {rank} did not start: {task.exception() or task.result()}", "failed")

    async def remove(self, rank: int, drain_timeout_s: float) -> None:
        """Returns when its process is gone."""
        task = self._tasks[rank]
        if self._ledger.is_down(rank):
            self._forget(rank)
        else:
            self._ledger.leave(rank, "remove")
            await self._end_when_idle(rank, "removed by an operator", drain_timeout_s)
        await self._until(task.done)
        self._tasks.pop(rank, None)

    def _forget(self, rank: int) -> None:
        """One that is down."""
        self._ledger.remove_down(rank)
        self._lives.pop(rank, None)
        self._publish()

    async def _end_when_idle(self, rank: int, cause: str, timeout_s: float) -> None:
        """What a rank still has when the time is over goes on elsewhere, as after a death."""
        self._publish()
        life = self._lives[rank]

        def is_idle() -> bool:
            assert self._plan is not None
            return life.death.done() or life.idle_at >= {address.index for address in self._plan.front_ends}

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until(is_idle), timeout_s)
        life.is_stuck = True  # it was not told to end
        life.prove_death(cause)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    # --- the end ---

    def give_up(self, cause: str) -> None:
        """The start failed, for a reason of the ranks or not."""
        if self._ledger.failed is None:
            self._ledger.failed = cause
        self._publish()

    def retire(self) -> None:
        """Ends are expected from here on: no rank is restarted."""
        self._retired = True
        self._ledger.retire()

    async def stop(self, timeout_s: float) -> None:
        """Waits for the ends that were asked for, then kills. A rank that still loads hears no orders: it is killed at once."""
        self.retire()
        lives = list(self._lives.values())
        waits = {asyncio.create_task(life.handle.wait()) for life in lives if life.handle and life.ready.is_set()}
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
        tasks = [*self._tasks.values(), *self._burials]
        for task in [*tasks, *(life.watcher for life in lives if life.watcher)]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(life.handle.kill() for life in self._lives.values() if life.handle))

"""The ranks of an endpoint as one front end sees them: their lives, our doubts, and the one way into death. Knows no sockets.

Theory of operation
-------------------
A rank says `EngineReady` once it has loaded, and is prepared before it takes requests. Then there are two ways to lose it.
**Proof**: the engine's own `EngineCoreDead`, or the launcher's verdict (it sees the process end). The first proof closes the
life: what has arrived is read, then `EngineDied` is queued behind it, and every later frame of that epoch is dropped.
**Suspicion**: no sign of life for three seconds, or work without a step. It only takes the rank out of rotation (`RankHealth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from balancer.ledger import LoadLedger
from balancer.rank_health import RankHealth, RankState
from cores import control_messages as control
from cores import messages as m
from cores.codec import Message
from cores.gaps import seq_before_life
from cores.words import counted
from gateway.config import FaultConfig, GatewayConfig
from gateway.core_client.base import EngineDied, EngineFailed, RanksChanged, Received
from gateway.core_client.rank import Rank, RankLife
from gateway.errors import EngineDeadError, GatewayError, OverloadedError
from gateway.event_log import REQUESTS, EventLog
from gateway.status import Lives, RankStatus

logger = logging.getLogger(__name__)

_UNHEARD = (RankState.STARTING, RankState.RESTARTING)
_SETTLED = (RankState.DEAD, RankState.RESTARTING)  # without a word of theirs
_IN_DOUBT = (RankState.SUSPECT, RankState.STALLED)


class Ranks:
    """`put` queues what the output handler is to know, in order; `read_all` takes in what has arrived by now."""

    def __init__(
        self,
        config: GatewayConfig,
        front_end_index: int,
        front_end_life: int,
        ledger: LoadLedger,
        clock: Callable[[], float],
        *,
        put: Callable[[Received], None],
        tell_launcher: Callable[[Message], None],
        read_all: Callable[[], None],
        on_serving: Callable[[RankLife], None],
        events: EventLog | None = None,
    ) -> None:
        self.events = events or EventLog()
        self.failure: str | None = None  # why no rank is left and none will come back
        self._is_told_failed = False  # that is the launcher's word, and it may take it back
        self.all_ready = asyncio.Event()  # or beyond hope
        self.known_lives: Callable[[int], Lives] = lambda number: Lives()  # what other front ends know of a rank's lives
        self.before_serving: Callable[[m.RankId], Awaitable[None]] | None = None  # what a rank needs before it takes requests
        self._fault: FaultConfig = config.fault
        self._front_end_index = front_end_index
        self._front_end_life = front_end_life
        self._ledger = ledger
        self._clock = clock
        self._put = put
        self._tell_launcher = tell_launcher
        self._read_all = read_all
        self._on_serving = on_serving
        self._ranks = {rank: Rank(self._new_life(m.RankId(rank, 0))) for rank in config.parallel.ranks}
        self._removed: dict[int, Rank] = {}  # a rank that gets their number counts on
        self._has_heard = False  # of the group, from the launcher
        self._last_eligible: set[m.RankId] = set()
        # First words of ranks that are not known yet, the latest of each.
        self._early: dict[int, tuple[bytes, m.EngineReady]] = {}
        self._preparations: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # replaced by a new one at every change of a life
        self._closed = False

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks.values())

    def __getitem__(self, number: int) -> Rank:
        return self._ranks[number]

    def find(self, number: int) -> Rank | None:
        """None for one that was removed."""
        return self._ranks.get(number)

    def close(self) -> None:
        """What dies from now on was asked to."""
        self._closed = True
        for preparation in self._preparations:
            preparation.cancel()

    # --- lives --------------------------------------------------------------------------------------------------------

    @property
    def lives(self) -> list[RankLife]:
        return [rank.life for rank in self]

    def living(self, rank_id: m.RankId | None) -> Rank | None:
        """The rank, if that is its present life and not over; None for frames that come too late or from nobody."""
        rank = None if rank_id is None else self._ranks.get(rank_id.rank)
        if rank is None or rank.life.rank_id != rank_id or rank.life.health.state == RankState.DEAD:
            return None
        return rank

    def life_of(self, rank_id: m.RankId) -> RankLife:
        """Raises `EngineDeadError` when that life is over."""
        rank = self.living(rank_id)
        if rank is None:
            gone = self.find(rank_id.rank)
            raise EngineDeadError(f"{rank_id} died", rank_id.rank, gone.death_cause if gone else "it was removed")
        return rank.life

    def on_engine_ready(self, identity: bytes, ready: m.EngineReady) -> bool:
        """The first word of a life. False when it is none: old, repeated, or of somebody else."""
        if identity != ready.rank_id.identity:
            return False  # nobody but a life itself may announce it: a newer one ends the one before
        rank = self._ranks.get(ready.rank_id.rank)
        if rank is None:
            # Added by an operator a moment ago, and faster than the launcher's word of it. It will not say so again.
            self._early[ready.rank_id.rank] = (identity, ready)
            return True
        if ready.rank_id.epoch < rank.life.rank_id.epoch:
            return False
        life = self._life_for(rank, ready.rank_id)
        if life.ready is not None or life.health.state == RankState.DEAD:
            return False
        life.ready = ready
        life.health.on_first_word(self._clock())
        if self.before_serving is None:
            self._begin_serving(life, ready)
        else:
            task = asyncio.create_task(self._prepare(life, ready, self.before_serving), name=f"prepare {life.rank_id}")
            self._preparations.add(task)
            task.add_done_callback(self._preparations.discard)
        return True

    async def _prepare(self, life: RankLife, ready: m.EngineReady, prepare: Callable[[m.RankId], Awaitable[None]]) -> None:
        try:
            await prepare(life.rank_id)
        except Exception as error:  # whatever it is: nobody else would ever see that this rank takes no requests
            level = logging.DEBUG if isinstance(error, GatewayError) else logging.ERROR
            logger.log(level, "%s cannot be prepared", life.rank_id, exc_info=error)
            self.declare_dead(life.rank_id, f"it could not be prepared: {error}")
        else:
            if life.health.state != RankState.DEAD:
                self._begin_serving(life, ready)

    def _begin_serving(self, life: RankLife, ready: m.EngineReady) -> None:
        now = self._clock()
        life.health.on_ready(now)
        self._ledger.add_rank(
            life.rank_id,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            max_num_seqs=ready.max_num_seqs,
            num_kv_blocks=ready.num_kv_blocks,
        )
        text = f"epoch {life.rank_id.epoch} is ready on {ready.node}, {ready.device}, pid {ready.pid}"
        self.events.add("ready", life.rank_id.rank, text, now, life.rank_id.epoch)
        self._check_all_ready()
        self._note_change()
        self.note_eligible()
        self._on_serving(life)

    def note_eligible(self) -> None:
        """Tells the output handler when there is a rank more to choose from: something may wait for it."""
        eligible = set(self.eligible)
        if not eligible <= self._last_eligible:
            self._put(RanksChanged())
        self._last_eligible = eligible

    async def until_heard(self, timeout_s: float) -> None:
        """Returns when every rank that the launcher calls ready takes requests from here, too, or has died; or after
        `timeout_s`: how it is then, its state says."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(life.is_up and life.health.state in _UNHEARD for life in self.lives):
                    await self._changed.wait()

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_all_ready(self) -> None:
        """A rank that the launcher has given up, or is starting again, is not waited for by a front end that starts later, nor
        one that is called ready and does not answer: others serve, and when it comes it is one more."""
        settled = (*_SETTLED, *_IN_DOUBT) if self._front_end_life > 1 else _SETTLED
        if any(life.ready for life in self.lives) and all(life.ready or life.health.state in settled for life in self.lives):
            self.all_ready.set()

    def _life_for(self, rank: Rank, rank_id: m.RankId) -> RankLife:
        """The rank's life of that epoch; a newer epoch than known begins one, and ends the older if nobody said so."""
        if rank_id.epoch > rank.life.rank_id.epoch:
            if rank.life.ready is not None:
                self.declare_dead(rank.life.rank_id, "it was replaced", tell_launcher=False)
            if rank.life.rank_id.epoch:  # 0 stands for what was before the first
                self.events.add("restart", rank_id.rank, f"epoch {rank_id.epoch} begins", self._clock(), rank_id.epoch)
            rank.begin_life(self._new_life(rank_id), self.known_lives)
        return rank.life

    def _new_life(self, rank_id: m.RankId) -> RankLife:
        health = RankHealth(rank_id, self._clock(), stall_timeout_s=self._fault.stall_timeout)
        # The rank's first reports to a front end that has started again may still count its predecessor's commands. They must
        # not pass for ours: every life has numbers of its own.
        return RankLife(rank_id, health, last_seq=seq_before_life(self._front_end_life))

    # --- death --------------------------------------------------------------------------------------------------------

    def on_group_state(self, group: control.GroupState) -> None:
        """The launcher's verdicts."""
        now = self._clock()
        self._note_membership({record.rank: record.epoch for record in group.ranks}, now)
        for record in group.ranks:
            rank = self._ranks[record.rank]
            if record.epoch < rank.life.rank_id.epoch:
                continue
            life = self._life_for(rank, m.RankId(record.rank, record.epoch))
            rank.restarts = record.restarts
            life.pid, life.start_progress = record.pid, record.start_progress
            rank.restart_pending = record.restart_pending
            life.is_leaving = life.is_leaving or record.is_leaving
            life.is_node_lost = record.is_node_lost
            self._note_drain(life, record, now)
            if record.state == "dead":
                self._read_all()  # what the rank still said comes before the news of its death
                self.declare_dead(life.rank_id, record.cause or "unknown cause", tell_launcher=False)
            life.health.on_launcher_state(record.state, now)
            life.is_up = record.state in ("ready", "draining")
        self.tell_idle()
        self._note_change()
        self.note_eligible()
        self._check_all_ready()
        self._note_failure(group.failed)

    def _note_failure(self, failed: str | None) -> None:
        if failed is not None and self.failure is None:
            self._is_told_failed = True
            self._give_up(failed)
        elif failed is None and self._is_told_failed:  # an operator's order brings a rank back
            self._is_told_failed = False
            self.failure = None

    def _note_drain(self, life: RankLife, record: control.RankRecord, now: float) -> None:
        """Snapshots repeat what was told before, and our own state may be another one. The launcher counts the orders: so that
        a front end that has started again knows which of them is in the log already."""
        before, life.num_drain_orders = life.num_drain_orders, record.num_drain_orders
        texts = {"draining": "gets no new requests", "ready": "gets new requests again"}
        if life.num_drain_orders > before and life.health.state is not RankState.DEAD and record.state in texts:
            rank, epoch = record.rank, record.epoch
            self.events.add("drain", rank, f"epoch {epoch} {texts[record.state]}", now, epoch, record.num_drain_orders)

    def _note_membership(self, epochs: dict[int, int], now: float) -> None:
        """An operator has added ranks, or removed some. What was done before we started is no news."""
        for number in epochs.keys() - self._ranks.keys():
            self._add(number)
            if self._has_heard:
                self.events.add("scale", number, "added", now, epochs[number])
            if number in self._early:
                self.on_engine_ready(*self._early.pop(number))
        for number in self._ranks.keys() - epochs.keys():
            life = self._ranks[number].life
            if self._has_heard or life.ready is not None:
                self._end_removed(life, now)
            self._removed[number] = self._ranks.pop(number)
        self._has_heard = True

    def _end_removed(self, life: RankLife, now: float) -> None:
        life.is_leaving = True
        self._read_all()
        self.declare_dead(life.rank_id, "removed by an operator", tell_launcher=False)
        self.events.add("scale", life.rank_id.rank, "removed", now, life.rank_id.epoch, occurrence=1)

    def _add(self, number: int) -> None:
        before, life = self._removed.pop(number, None), self._new_life(m.RankId(number, 0))
        if before is None:
            self._ranks[number] = Rank(life)
        else:
            before.begin_life(life, self.known_lives)
            self._ranks[number] = before

    def tell_idle(self) -> None:
        """Tells the launcher, once, which of the draining ranks have nothing of ours any more."""
        for life in self.lives:
            if life.health.state is not RankState.DRAINING:
                life.has_told_idle = False
            elif not life.has_told_idle and not self._ledger.handles_on(life.rank_id):
                life.has_told_idle = True
                self._tell_launcher(control.RankIdle(self._front_end_index, life.rank_id))

    def declare_dead(self, rank_id: m.RankId, cause: str, *, tell_launcher: bool = True) -> None:
        """The one way into death. The first proof counts."""
        rank = self.living(rank_id)
        if rank is None:
            return
        now, headline = self._clock(), cause.partition("\n")[0]
        rank.life.health.on_dead(now, headline)
        rank.on_death(headline, now)
        self._note_change()
        is_by_order = rank.life.is_leaving
        kind, end = ("drain", "ended") if is_by_order else ("death", "died")
        num_held = len(self._ledger.handles_on(rank_id))
        text = f"epoch {rank_id.epoch} {end} with {REQUESTS} in flight: {headline}"
        self.events.add(kind, rank_id.rank, text, now, rank_id.epoch, num_requests=num_held)
        level = logging.INFO if self._closed or is_by_order else logging.ERROR
        logger.log(level, "%s %s with %s in flight: %s", rank_id, end, counted(num_held, "request"), headline)
        self._put(EngineDied(rank_id, headline, is_by_order or rank.life.is_node_lost))
        if tell_launcher:
            self._tell_launcher(control.RankDied(rank_id, headline))

    def note_moved(self, died: EngineDied, num_moved: int, num_lost: int, num_waiting: int = 0) -> None:
        """For the counters and the event log. `num_waiting`: of those moved, how many have found no rank yet."""
        if (rank := self.find(died.rank_id.rank)) is not None:
            rank.requests_moved_away += num_moved
        number, epoch = died.rank_id.rank, died.rank_id.epoch
        happened = (
            ("went on elsewhere", num_moved - num_waiting),
            ("failed", num_lost),
            ("had to wait for a rank", num_waiting),
        )
        for occurrence, (what, num) in enumerate(happened):
            if num:
                text = f"{REQUESTS} of epoch {epoch} {what}"
                self.events.add("move", number, text, self._clock(), epoch, occurrence, num)

    def fail(self, cause: str) -> None:
        """Nothing works any more, for a reason that is no rank's own."""
        for life in self.lives:
            self.declare_dead(life.rank_id, cause, tell_launcher=False)
        self._give_up(cause)

    def _give_up(self, cause: str) -> None:
        self.failure = cause
        self._put(EngineFailed(cause))
        self.all_ready.set()

    # --- doubt --------------------------------------------------------------------------------------------------------

    def look_for_silence(self, now: float) -> None:
        for life in self.lives:
            self._check_silence(life, now)
        self._check_all_ready()

    def _check_silence(self, life: RankLife, now: float) -> None:
        state = life.health.on_timer(now, has_own_work=bool(self._ledger.handles_on(life.rank_id)))
        if state is RankState.SUSPECT:
            silent_s = life.health.last_seen_s(now)
            logger.warning("%s is suspect: nothing heard for %.1f s", life.rank_id, silent_s)
            self._tell_launcher(control.RankSuspected(life.rank_id, silent_s))
        elif state is RankState.STALLED:
            life.num_stalls += 1
            what = "it has work and made no step" if life.ready else "it is ready and did not answer a front end"
            text = f"stalled: {what} for {life.health.last_progress_s(now):.1f} s"
            logger.warning("%s %s", life.rank_id, text)
            rank, epoch = life.rank_id.rank, life.rank_id.epoch
            self.events.add("stall", rank, f"epoch {epoch} {text}", now, epoch, life.num_stalls)
            self._tell_launcher(control.RankStalled(life.rank_id, text))

    # --- which there are ----------------------------------------------------------------------------------------------

    @property
    def eligible(self) -> list[m.RankId]:
        """The ready ranks. Where there is none, those that are only silent: most likely they are slow, and if not, failover
        takes back what they get."""
        ready = [life.rank_id for life in self.lives if life.is_eligible]
        silent = [life for life in self.lives if life.health.is_serving and life.health.state is RankState.SUSPECT]
        return ready or [life.rank_id for life in silent]

    def eligible_for(self, lora_name: str | None) -> list[m.RankId]:
        """Those that have the adapter. If none has it, all: the engine says why."""
        eligible = self.eligible
        if lora_name is None:
            return eligible
        return [rank_id for rank_id in eligible if lora_name not in self[rank_id.rank].life.missing_loras] or eligible

    @property
    def serving(self) -> list[m.RankId]:
        return [life.rank_id for life in self.lives if life.health.is_serving]

    @property
    def standstill(self) -> str | None:
        """ "draining", "paused" or "sleeping" when that is why no rank takes requests."""
        states = {life.health.state for life in self.lives if not life.is_leaving}  # for what leaves, requests wait
        if RankState.READY in states:
            return None
        return next((s.value for s in (RankState.SLEEPING, RankState.PAUSED, RankState.DRAINING) if s in states), None)

    @property
    def standstill_cause(self) -> str:
        """For people. An engine also drains by itself, before a pause: of that undraining would be no end."""
        lives = [life for life in self.lives if not life.is_leaving]
        drained = [life for life in lives if life.health.state is RankState.DRAINING]
        if self.standstill != RankState.DRAINING or any(life.health.refuses_requests for life in drained):
            return f"it is {self.standstill}"
        ranks = "all" if len(drained) == len(lives) else " ".join(str(life.rank_id.rank) for life in drained)
        return f"an operator has drained its ranks; `gateway ranks undrain {ranks}` takes them back"

    @property
    def awaits_restart(self) -> bool:
        """No rank serves, or only such that an operator has just restarted; but one will."""
        reachable = [life for life in self.lives if life.health.is_serving and life.unreachable_s is None]
        if self.failure is not None or any(not life.is_leaving for life in reachable):
            return False
        is_ordered = any(life.is_leaving or life.health.state is RankState.RESTARTING for life in self.lives)
        return is_ordered or self._fault.engine_restarts > 0

    def unavailable(self, what: str = "no rank can take a request now") -> OverloadedError | EngineDeadError:
        if self.failure is not None:
            return EngineDeadError(f"the engine is dead: {self.failure}", cause=self.failure)
        return OverloadedError(
            f"{what}: {', '.join(f'rank {number} {rank.life.condition}' for number, rank in self._ranks.items())}"
        )

    @property
    def num_reported_tokens(self) -> int:
        """Prompt tokens that the ranks say they still have to compute."""
        return sum(life.load.num_prefill_tokens for life in self.lives if life.health.is_eligible)

    def report(self) -> tuple[tuple[m.RankId, str, m.RankLoad], ...]:
        """What other endpoints are told of them."""
        return tuple((life.rank_id, life.health.state.value, life.load) for life in self.lives)

    def statuses(self, now: float) -> list[RankStatus]:
        ledger = self._ledger
        ids = [(rank, rank.life.rank_id) for rank in self]
        return [rank.status(now, ledger.booked_tokens(id_), ledger.num_booked(id_)) for rank, id_ in ids]

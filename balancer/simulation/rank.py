"""One engine in virtual time: the real scheduler, prefix cache and load report, with a cost model in the model's place.

Rules
-----
* Whoever looks at a rank or sends it something at a time has first advanced it to that time.
* A command takes effect when the next step begins: at once on an idle rank.
* What a step did is seen when it ends, by one report to each front end.

Theory of operation
-------------------
A step that only decoded, ended no request and found no place for one that waits will repeat, one token longer each time, until
a command comes, a request ends, or blocks run short. So the ends of all those steps are known at once, from the same formula in
the same order of additions, and their tokens can be booked when the stretch is over or broken off. Only a request that fills a
block or needs a new one is booked up to that step and put to the real cache. `fast_forward` says whether all this is done; no
time stamp, report or decision depends on it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from balancer.simulation.request import SimulatedRequest
from cores.cache_watch import CacheWatch
from cores.config import SimulatedConfig
from cores.kv_cache_manager import KVCacheManager
from cores.messages import CacheEvents, RankId, RankLoad
from cores.request import Request, RequestKey
from cores.runner.interface import ModelRunnerOutput, SchedulerOutput
from cores.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from cores.step_times import StepTimes

MAX_STRETCH_STEPS = 256  # a bound for what is planned in vain when a command comes
NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    cost: SimulatedConfig
    num_kv_blocks: int
    block_size: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    fast_forward: bool = True


class StepReport(NamedTuple):
    """What a front end hears of one step. Requests are named by key: each front end knows its own."""

    end_s: float
    step: int
    command_seqs: tuple[int, ...]  # by front end
    load: RankLoad
    first_tokens: Sequence[RequestKey]
    finished: Sequence[RequestKey]
    cache_events: Mapping[int, CacheEvents]  # by front end, for those that watch the cache


class _Command(NamedTuple):
    seq: int  # by front end
    request: SimulatedRequest
    is_abort: bool


@dataclass(slots=True)
class Stretch:
    """Steps that only decode the same requests. The first `num_told` have ended and are reported."""

    requests: list[Request]
    num_steps: int
    ends_s: list[float] = field(default_factory=list)
    num_told: int = 0
    num_booked: dict[RequestKey, int] = field(default_factory=dict)  # of those, the steps that a request's tokens show
    by_phase: dict[int, list[Request]] = field(default_factory=dict)  # tokens in the last block, at the beginning


class SimulatedScheduler(Scheduler):
    """The engine's, and many of its steps at once where each would be like the last."""

    now = 0.0

    def _preempt(self, request: Request) -> None:
        _record(request).last_token_s = self.now
        super()._preempt(request)

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    def begin_stretch(self, batch: SchedulerOutput) -> Stretch | None:
        """Steps like `batch`, which only decoded, before one that ends a request. None: it is the next, or short of blocks."""
        requests = [scheduled.request for scheduled in batch.scheduled]
        num_steps = min(request.max_total_tokens - 1 - request.num_tokens for request in requests)
        stretch = Stretch(requests, min(num_steps, MAX_STRETCH_STEPS))
        for request in requests:
            stretch.by_phase.setdefault(request.num_tokens % self.kv_cache.block_size, []).append(request)
        return stretch if num_steps > 0 and self.begin_repeat(stretch) else None

    def begin_repeat(self, stretch: Stretch) -> bool:
        """What scheduling the next step does to the KV cache. False, and nothing done: it is short of blocks."""
        size, index = self.kv_cache.block_size, stretch.num_told
        filling, growing = stretch.by_phase.get(-index % size), stretch.by_phase.get((1 - index) % size)
        if filling or growing:
            requests = sorted({id(r): r for r in (*(filling or ()), *(growing or ()))}.values(), key=lambda r: r.queue_key)
            if self.kv_cache.num_blocks_free < len(requests):
                return False
            for request in requests:
                self._book_repeats(stretch, request)
                self.kv_cache.grow(request)
                self.kv_cache.enter_cache(request, request.num_tokens)
        return True

    def end_stretch(self, stretch: Stretch) -> None:
        for request in stretch.requests:
            self._book_repeats(stretch, request)
        self._num_steps += stretch.num_told
        self._num_generation_tokens += stretch.num_told * len(stretch.requests)

    def _book_repeats(self, stretch: Stretch, request: Request) -> None:
        num_steps = stretch.num_told - stretch.num_booked.get(request.key, 0)
        request.token_ids.extend(bytes(num_steps))
        request.num_computed_tokens += num_steps
        stretch.num_booked[request.key] = stretch.num_told

    @property
    def waiting(self) -> Iterable[Request]:
        return self._waiting

    @property
    def running(self) -> Iterable[Request]:
        return self._running

    def num_cached_tokens(self, request: SimulatedRequest) -> int:
        """Of its prompt, if it were admitted now."""
        return self.kv_cache.num_cached_tokens(request.for_scheduler())


def _record(request: Request) -> SimulatedRequest:
    return cast(SimulatedRequest, request.runner_state)


@dataclass(slots=True)
class StepLog:
    """What steps took, for the report. One entry for each step that decoded."""

    busy_s: float = 0.0
    num_steps: int = 0
    decode_s: array[float] = field(default_factory=lambda: array("d"))
    num_decodes: array[int] = field(default_factory=lambda: array("l"))

    def add(self, step_s: float, num_decodes: int) -> None:
        self.num_steps += 1
        self.busy_s += step_s
        if num_decodes:
            self.decode_s.append(step_s)
            self.num_decodes.append(num_decodes)

    def extend(self, other: StepLog) -> None:
        self.busy_s += other.busy_s
        self.num_steps += other.num_steps
        self.decode_s.extend(other.decode_s)
        self.num_decodes.extend(other.num_decodes)


class SimulatedRank:
    """One life of a rank."""

    def __init__(self, rank_id: RankId, config: RankConfig, num_front_ends: int, slowness: float = 1.0) -> None:
        self.rank_id = rank_id
        self.config = config
        self.slowness = slowness  # factor on the time of every step that begins from now on
        self.outboxes: list[deque[StepReport]] = [deque() for _ in range(num_front_ends)]
        self.log = StepLog()
        self.next_end_s = NEVER  # of the step that is being computed
        self._num_steps = 0
        kv_cache = KVCacheManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self._scheduler = SimulatedScheduler(
            SchedulerConfig(
                max_model_len=kv_cache.num_tokens_capacity,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
            kv_cache,
        )
        self._times = StepTimes()
        self._cache_watch = CacheWatch(rank_id, kv_cache.record_changes, kv_cache.cached_landmarks)
        self._inbox: list[_Command] = []
        self._command_seqs = (0,) * num_front_ends
        self._batch: SchedulerOutput | None = None  # of the step that is being computed, if it is not part of a stretch
        self._start_s = 0.0
        self._stretch: Stretch | None = None
        self._is_calm = True  # nothing was preempted for the batch that is being computed
        self.is_dead = False

    @property
    def scheduler(self) -> SimulatedScheduler:
        """To look at. Within a stretch its requests may be as they were at the beginning, `num_unbooked_steps` ago."""
        return self._scheduler

    @property
    def num_unbooked_steps(self) -> int:
        return 0 if self._stretch is None else self._stretch.num_told

    @property
    def num_prompt_tokens_under_way(self) -> int:
        """That the step that is being computed will have done."""
        return 0 if self._batch is None else self._batch.num_tokens - self._batch.num_decodes

    @property
    def inbox(self) -> list[SimulatedRequest]:
        """Requests that the next step will find."""
        return [command.request for command in self._inbox if not command.is_abort]

    @property
    def has_work(self) -> bool:
        return self.next_end_s < NEVER

    def watch_cache(self, front_end: int) -> None:
        """Tell this front end what comes into the prefix cache and what leaves it."""
        self._cache_watch.watch(front_end)

    # --- commands -----------------------------------------------------------------------------------------------------

    def submit(self, now: float, seq: int, request: SimulatedRequest, *, is_abort: bool = False) -> None:
        """A request, or the end of one that its client has left. A dead rank takes it and does nothing, as a socket would."""
        if self.is_dead:
            return
        self._inbox.append(_Command(seq, request, is_abort))
        self._break_off()
        if self.next_end_s == NEVER:
            self._begin_step(now)

    def slow_down(self, slowness: float) -> None:
        """From the next step on."""
        self._break_off()
        self.slowness = slowness

    def die(self) -> None:
        """What is not delivered is lost."""
        if self._stretch is not None:
            self._scheduler.end_stretch(self._stretch)
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            record = _record(request)
            record.num_output_tokens = request.num_output_tokens
            if request.is_decoding:
                record.last_token_s = self._start_s
        self.is_dead = True
        self._batch = self._stretch = None
        self.next_end_s = NEVER
        self._inbox.clear()

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, until_s: float) -> None:
        """Computes every step that ends by then, and begins the next."""
        while self.next_end_s <= until_s:
            if self._stretch is not None:
                self._tell_stretch(until_s)
            else:
                self._end_step(self.next_end_s)

    def _begin_step(self, now: float) -> None:
        self._take_commands(now)
        self._start_s, self.next_end_s = now, NEVER
        if self._scheduler.has_work:
            self._scheduler.now = now
            num_preemptions = self._scheduler.num_preemptions
            self._batch = self._scheduler.schedule(now)
            self._is_calm = self._scheduler.num_preemptions == num_preemptions
            self.next_end_s = now + self._step_s(self._batch)

    def _take_commands(self, now: float) -> None:
        if not self._inbox:
            return
        seqs, refused = list(self._command_seqs), []
        for seq, record, is_abort in self._inbox:
            seqs[record.front_end] = seq
            if is_abort:
                self._scheduler.abort(record.key)
            elif refusal := self._scheduler.add_request(record.for_scheduler(), now):
                record.on_end(now, refusal.error or refusal.reason.text)
                refused.append(record.key)
        self._inbox.clear()
        self._command_seqs = tuple(seqs)
        # With several front ends each hears of the others' requests before the step that computes them, and not only after.
        if refused or len(self.outboxes) > 1:
            self._tell(now, finished=refused)

    def _step_s(self, batch: SchedulerOutput) -> float:
        num_context_tokens = sum(s.request.num_computed_tokens + s.num_tokens for s in batch.scheduled)
        num_prompt_tokens = batch.num_tokens - batch.num_decodes
        return self.slowness * self.config.cost.step_s(num_prompt_tokens, len(batch.scheduled), num_context_tokens)

    def _end_step(self, now: float) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        num_samples = sum(scheduled.samples for scheduled in batch.scheduled)
        updates = self._scheduler.update(batch, ModelRunnerOutput([0] * num_samples))
        first_tokens, finished = _note_updates(now, updates, batch.num_decodes)
        num_prompt_tokens = batch.num_tokens - batch.num_decodes
        self._log_step(now, num_prompt_tokens, batch.num_decodes)
        self._tell(now, first_tokens, finished)
        repeats = num_prompt_tokens == 0 and self._is_calm and not finished and not self._inbox
        if not (repeats and self.config.fast_forward and self._begin_stretch(now, batch)):
            self._begin_step(now)

    def _begin_stretch(self, now: float, batch: SchedulerOutput) -> bool:
        stretch = self._scheduler.begin_stretch(batch)
        if stretch is None:
            return False
        num_seqs, cost = len(stretch.requests), self.config.cost
        num_context_tokens = sum(request.num_tokens for request in stretch.requests)
        end_s = now
        for _ in range(stretch.num_steps):
            end_s += self.slowness * cost.step_s(0, num_seqs, num_context_tokens)
            stretch.ends_s.append(end_s)
            num_context_tokens += num_seqs
        self._stretch = stretch
        self._start_s, self.next_end_s = now, stretch.ends_s[0]
        return True

    def _break_off(self) -> None:
        """Something changes with the next step: the one that is being computed is the last of its kind."""
        if self._stretch is not None:
            del self._stretch.ends_s[self._stretch.num_told + 1 :]

    def _tell_stretch(self, until_s: float) -> None:
        stretch = self._stretch
        assert stretch is not None
        ends_s = stretch.ends_s
        while stretch.num_told < len(ends_s):
            end_s = ends_s[stretch.num_told]
            if end_s > until_s:
                self.next_end_s = end_s
                return
            stretch.num_told += 1
            self._log_step(end_s, 0, len(stretch.requests))
            self._tell(end_s)
            self._start_s = end_s
            if stretch.num_told < len(ends_s) and not self._scheduler.begin_repeat(stretch):
                del ends_s[stretch.num_told :]
        self._scheduler.end_stretch(stretch)
        self._stretch = None
        self._begin_step(ends_s[-1])

    def _log_step(self, now: float, num_prompt_tokens: int, num_decodes: int) -> None:
        step_s = now - self._start_s
        self._num_steps += 1
        self._times.add(step_s, num_prompt_tokens, num_decodes)
        self.log.add(step_s, num_decodes)

    def _tell(self, now: float, first_tokens: Sequence[RequestKey] = (), finished: Sequence[RequestKey] = ()) -> None:
        times = self._times
        load = self._scheduler.load(times.step_ms, times.prefill_tokens_per_s, times.decode_tokens_per_s)
        events = self._cache_watch.take_events()
        report = StepReport(now, self._num_steps, self._command_seqs, load, first_tokens, finished, events)
        for outbox in self.outboxes:
            outbox.append(report)

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()
        assert (self.next_end_s == NEVER) == (self._batch is None and self._stretch is None)
        assert self._batch is None or self._stretch is None


def _note_updates(now: float, updates: list[RequestUpdate], num_decodes: int) -> tuple[list[RequestKey], list[RequestKey]]:
    """Writes down first tokens and ends; the keys of both. The first `num_decodes` had a token in the step before."""
    first_tokens, finished = [], []
    for index, update in enumerate(updates):
        if index >= num_decodes:
            _record(update.request).on_prompt_done(now, update.request)
        if update.is_first:
            first_tokens.append(update.request.key)
        if update.finished is not None:
            if not _record(update.request).has_left:
                _record(update.request).on_end(now)
            finished.append(update.request.key)
    return first_tokens, finished

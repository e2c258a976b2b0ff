"""Whatever arrives in whatever order, into however small a cache: everybody ends, nobody holds a block of another."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.kv_cache_manager import KVCacheManager
from cores.messages import EngineCoreRequest, FinishReason, RankId
from cores.request import Request
from cores.runner.interface import ModelInfo, ModelRunnerOutput, SchedulerOutput
from cores.runner.simulated import SimulatedModelRunner
from cores.scheduler import Scheduler, SchedulerConfig
from cores.testing import ManualClock, make_request

MAX_MODEL_LEN = 64


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    max_tokens: int
    priority: int
    lora_id: str | None
    abort_step: int | None
    prompt_logprobs: int | None


@dataclass
class Case:
    arrivals: list[Arrival]
    num_blocks: int
    block_size: int
    budget: int
    max_num_seqs: int
    policy: str
    max_loras: int
    prefix_caching: bool
    max_num_prompt_logprobs: int
    deferred: list[tuple[int, int]]  # (step, index among those that sample): their token comes a step later


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stems = [[3 + stem] * 40 for stem in range(3)]  # prompts share prefixes, up to being equal
    arrivals = []
    block_size = draw(st.sampled_from([1, 4, 8]))
    for _ in range(draw(st.integers(1, 12))):
        shared = draw(st.sampled_from(stems))[: draw(st.sampled_from([0, 5, 12, 40]))]
        own = draw(st.lists(st.integers(3, 9), max_size=12))
        start = draw(st.sampled_from([0, 0, 1, 4, 10]))
        abort_after = draw(st.sampled_from([None, None, None, 0, 2, 8]))
        arrivals.append(
            Arrival(
                step=start,
                prompt=shared + own or [3],
                max_tokens=draw(st.sampled_from([1, 2, 9, 30])),
                priority=draw(st.integers(0, 2)),
                lora_id=draw(st.sampled_from([None, None, "a", "b", "c"])),
                abort_step=None if abort_after is None else start + abort_after,
                prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            )
        )
    return Case(
        arrivals=arrivals,
        num_blocks=-(-draw(st.integers(16, 90)) // block_size),
        block_size=block_size,
        budget=draw(st.sampled_from([100, 16, 5, 1])),
        max_num_seqs=draw(st.sampled_from([16, 3, 1])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_loras=draw(st.sampled_from([1, 2, 4])),
        prefix_caching=draw(st.booleans()),
        max_num_prompt_logprobs=draw(st.sampled_from([1000, 7, 1])),
        deferred=draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=8)),
    )


@dataclass
class Tracker:
    """Runs one case to its end and checks each step."""

    case: Case
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    def run(self) -> Scheduler:
        case = self.case
        kv_cache = KVCacheManager(case.num_blocks, case.block_size, case.prefix_caching)
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.budget,
            policy=case.policy,  # type: ignore[arg-type]  # drawn from the two literals
            max_loras=case.max_loras,
            max_num_prompt_logprobs=case.max_num_prompt_logprobs,
        )
        scheduler = Scheduler(config, kv_cache)
        # Each step computes at least one token; preemption computes some again. Far more than this would be starvation.
        bound = 20 + 60 * sum(len(a.prompt) + a.max_tokens for a in case.arrivals)
        for step in range(bound):
            self._arrive_and_leave(scheduler, step)
            scheduler.check_invariants()
            if scheduler.has_work:
                self._step(scheduler, step)
            elif step > 30:
                break
            scheduler.check_invariants()
        assert not scheduler.has_work, "somebody starves"
        return scheduler

    def _arrive_and_leave(self, scheduler: Scheduler, step: int) -> None:
        for handle, arrival in enumerate(self.case.arrivals):
            if arrival.step == step:
                message = make_request(
                    handle, arrival.prompt, max_tokens=arrival.max_tokens, priority=arrival.priority,
                    prompt_logprobs=arrival.prompt_logprobs,
                )  # fmt: skip
                request = Request.from_engine_core_request(0, message, scheduler.max_model_len, lora_id=arrival.lora_id)
                self.tokens[handle] = []
                finished = scheduler.add_request(request, float(step))
                if finished is not None:
                    self._end(handle, finished.reason)
            if arrival.abort_step == step and scheduler.abort((0, handle)) is not None:
                self.aborted.add(handle)
                self._end(handle, FinishReason.ABORT)

    def _step(self, scheduler: Scheduler, step: int) -> None:
        num_preemptions = scheduler.stats().num_preemptions
        batch = scheduler.schedule(float(step))
        self._check_batch(batch)
        if scheduler.stats().num_preemptions == num_preemptions:
            self._check_order(batch, scheduler)
        scheduler.check_invariants()
        output = ModelRunnerOutput(
            [len(s.request.token_ids) % 7 + 3 for s in batch.scheduled if s.samples],
            deferred=frozenset(index for at, index in self.case.deferred if at == step),
        )
        for update in scheduler.update(batch, output):
            handle = update.request.key[1]
            assert handle not in self.ends, "a token after the end"
            assert update.token_id is not None
            assert update.is_first == (not self.tokens[handle])
            self.tokens[handle].append(update.token_id)
            if update.finished is not None:
                self._end(handle, update.finished.reason)

    def _check_batch(self, batch: SchedulerOutput) -> None:
        assert 0 < batch.num_tokens <= self.case.budget
        assert batch.num_tokens == sum(s.num_tokens for s in batch.scheduled)
        assert len(batch.scheduled) <= self.case.max_num_seqs
        assert len({s.request.key for s in batch.scheduled}) == len(batch.scheduled)
        assert len({s.request.lora_id for s in batch.scheduled} - {None}) <= self.case.max_loras
        for position, scheduled in enumerate(batch.scheduled):
            request = scheduled.request
            end = request.num_computed_tokens + scheduled.num_tokens
            assert scheduled.num_tokens > 0
            assert end <= len(request.block_ids) * self.case.block_size, "computes into blocks it does not hold"
            assert scheduled.samples == (end == request.num_tokens)
            if position < batch.num_decodes:
                assert request.is_decoding

    def _check_order(self, batch: SchedulerOutput, scheduler: Scheduler) -> None:
        """Nobody runs in the place of a more urgent one who could begin in it, with its budget, its slot and its blocks."""
        owing = [s.num_tokens for s in batch.scheduled if s.request.needs_prompt_logprobs]
        assert sum(owing) <= self.case.max_num_prompt_logprobs
        waiting, running = list(scheduler._waiting), list(scheduler._running)
        if not waiting or batch.num_tokens == self.case.budget:
            return
        head, kv_cache = waiting[0], scheduler.kv_cache
        if head.needs_prompt_logprobs and sum(owing) == self.case.max_num_prompt_logprobs:
            return
        worse = [request for request in running if request.queue_key[0] > head.queue_key[0]]
        loras = {r.lora_id for r in running if r not in worse and r.lora_id is not None}
        num_free = kv_cache.num_blocks_free + sum(kv_cache.num_blocks_held_alone(r) for r in worse)
        has_slot = head.lora_id is None or len(loras | {head.lora_id}) <= self.case.max_loras
        fits = kv_cache.num_blocks_to_admit(head) + len(running) - len(worse) <= num_free
        assert not (worse and has_slot and fits), "a priority is inverted"
        event(f"a more urgent one waits and nobody can help it: {bool(worse)}")

    def _end(self, handle: int, reason: FinishReason) -> None:
        assert handle not in self.ends, "two ends"
        self.ends[handle] = reason


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_request_ends_once_with_exactly_its_tokens(case: Case) -> None:
    tracker = Tracker(case)
    scheduler = tracker.run()
    capacity = min(MAX_MODEL_LEN, case.num_blocks * case.block_size)
    for handle, arrival in enumerate(case.arrivals):
        if handle in tracker.aborted:
            continue
        if len(arrival.prompt) >= capacity:
            assert tracker.ends[handle] is FinishReason.ERROR
        else:
            assert tracker.ends[handle] is FinishReason.LENGTH
            assert len(tracker.tokens[handle]) == min(arrival.max_tokens, capacity - len(arrival.prompt))
    load, stats = scheduler.load(), scheduler.stats()
    assert (load.num_waiting, load.num_running, load.num_prefill_tokens, load.num_decodes, load.num_kv_blocks_used) == (0,) * 5
    assert stats.num_requests == len(case.arrivals)
    assert stats.num_generation_tokens == sum(map(len, tracker.tokens.values()))
    event(f"preempted: {stats.num_preemptions > 0}")
    event(f"prefix hits: {stats.prefix_cache_hits > 0}")


class PrefixCheckingRunner(SimulatedModelRunner):
    """Writes each computed token's whole history into its slot of a make-believe KV cache, and checks on reading that every
    slot of a sequence holds the history of that very sequence: what a wrong block table or a wrong cache hit would break."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, RankId(0, 1), sleep=lambda _: None)
        self._slots: dict[int, tuple[int, ...]] = {}
        self._choices = list(range(3, 10))

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        for scheduled in batch.scheduled:
            request, size = scheduled.request, self._config.block_size
            end = request.num_computed_tokens + scheduled.num_tokens
            slots = [request.block_ids[p // size] * size + p % size for p in range(end)]
            for p in range(request.num_computed_tokens, end):
                self._slots[slots[p]] = tuple(request.token_ids[: p + 1])
        for scheduled in batch.scheduled:
            request, size = scheduled.request, self._config.block_size
            for p in range(request.num_computed_tokens + scheduled.num_tokens):
                slot = request.block_ids[p // size] * size + p % size
                assert self._slots[slot] == tuple(request.token_ids[: p + 1]), "K/V of another sequence"
        return super().execute(batch)


def run_engine(case: Case, requests: dict[int, tuple[int, EngineCoreRequest]]) -> dict[int, list[int]]:
    """`requests` by handle: (step of arrival, request). Returns each one's tokens."""
    config = EngineConfig(
        model="unused", engine="simulated", max_num_seqs=case.max_num_seqs, max_num_batched_tokens=case.budget,
        block_size=case.block_size, enable_prefix_caching=case.prefix_caching,
    )  # fmt: skip
    info = ModelInfo(
        "cpu", MAX_MODEL_LEN, vocab_size=50, eos_token_ids=(), num_kv_blocks=case.num_blocks, block_size=case.block_size
    )
    core = EngineCore(RankId(0, 1), config, info, PrefixCheckingRunner(config), ManualClock())
    tokens: dict[int, list[int]] = {handle: [] for handle in requests}
    step = 0
    while core.has_work or step <= 10:
        for arrival, request in requests.values():
            if arrival == step:
                core.add_request(0, request)
        for outputs in core.step().values():
            counts = outputs.counts or array("I", [1]) * len(outputs.handles)
            position = 0
            for handle, count in zip(outputs.handles, counts, strict=True):
                tokens[handle] += outputs.token_ids[position : position + count]
                position += count
        step += 1
    core.check_invariants()
    return tokens


@given(cases())
@settings(max_examples=60, deadline=None)
def test_tokens_are_the_same_alone_batched_and_preempted(case: Case) -> None:
    requests = {
        handle: (a.step, make_request(handle, a.prompt, max_tokens=a.max_tokens, temperature=float(handle % 2)))
        for handle, a in enumerate(case.arrivals)
    }
    together = run_engine(case, requests)
    for handle, (_, request) in requests.items():
        assert run_engine(case, {handle: (0, request)})[handle] == together[handle]

"""Which requests compute how many tokens in the next step, and when each ends. Pure: no torch, no clock, no sockets.

Rules
-----
* One token budget per step. Decodes take theirs first, then prompts in chunks, those already begun before new ones.
* Waiting and running requests each stand in one order, (priority, arrival). The head is never passed over by those behind it:
  nobody starves, but for those with a worse priority than all that keeps coming.
* Only a request whose LoRA adapter has no slot is passed over. After `MAX_PASSED_OVER` times the adapter that will leave first
  takes no more requests from behind it, so that a slot becomes free.
* A waiting request takes the place and the blocks of running ones with a worse priority, and its prompt goes before theirs:
  no priority is inverted, neither by `max_num_seqs`, nor by the cache, nor by a long prompt.
* When decoding runs out of KV blocks, the last of the running gives up its blocks and goes back to its place in the queue
  with all its tokens, to be computed again. The first is never the victim and always fits, so there is always progress.
* A request that can never fit ends at once with an error; none is ever dropped.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cores.kv_cache_manager import KVCacheManager
from cores.lora import RunningLoras
from cores.messages import Finished, FinishReason, PromptLogprobsChunk, RankLoad, SchedulerStats, TokenLogprobs
from cores.priority import Room, who_gives_way
from cores.request import Request, RequestKey, RequestStatus
from cores.runner.interface import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from cores.words import counted

MAX_PASSED_OVER = 32  # enough for a good batch of one adapter's requests before the next one's turn
MAX_LOOK_AHEAD = 256  # requests that one step looks at for one whose adapter has a slot: a long queue must not cost every step


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # Prompt tokens of one step that want log-probabilities: each takes a row of logits, as wide as the vocabulary.
    max_num_prompt_logprobs: int = 1024
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_loras: int = 0  # different adapters in one step
    whole_prompts: bool = False  # a prompt is computed in one step or not at all: each of its tokens sees all others


@dataclass(slots=True)
class RequestUpdate:
    """What one step did to one request: a new token, an end, or both; or part of its prompt's log-probabilities."""

    request: Request
    token_id: int | None
    is_first: bool = False
    finished: Finished | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobsChunk | None = None
    vector: bytes | None = None  # instead of a token, of a request that pools


class RequestQueue:
    """Requests by `queue_key`. A sorted list: new ones mostly go to its end, and any can leave."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_queue_key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.queue_key, key=_queue_key)
        assert self._requests[index] is request
        del self._requests[index]


def _queue_key(request: Request) -> tuple[int, int]:
    return request.queue_key


class Scheduler:
    """Owns every request from its arrival to its end, and all state of each."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.loras = RunningLoras(config.max_loras)
        # A decode takes one token of the budget: with more sequences than tokens some would never get theirs.
        self._max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.max_model_len = min(config.max_model_len, kv_cache.num_tokens_capacity)
        assert not config.whole_prompts or self.max_model_len <= config.max_num_batched_tokens
        self._requests: dict[RequestKey, Request] = {}
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._num_arrived = 0
        self._num_prefill_tokens = 0  # over all requests: tokens to compute before each decodes (again)
        self._num_decodes = 0
        self._num_prompt_logprobs_left = 0  # in the step that is being scheduled
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def request_keys(self) -> list[RequestKey]:
        return list(self._requests)

    def lora_ids(self) -> set[str]:
        """Adapters of all requests, waiting ones too."""
        return {request.lora_id for request in self._requests.values() if request.lora_id is not None}

    def load(self, step_ms: float = 0.0, prefill_tokens_per_s: float = 0.0, decode_tokens_per_s: float = 0.0) -> RankLoad:
        return RankLoad(
            len(self._waiting), len(self._running), self._num_prefill_tokens, self._num_decodes,
            self.kv_cache.num_blocks_used, self.kv_cache.num_blocks, step_ms, prefill_tokens_per_s, decode_tokens_per_s,
        )  # fmt: skip

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            self._num_steps, self._num_arrived, self._num_prompt_tokens, self._num_generation_tokens,
            self._prefix_cache_queries, self._prefix_cache_hits, self._num_preemptions,
        )  # fmt: skip

    # --- arrivals and departures --------------------------------------------------------------------------------------

    def add_request(self, request: Request, now: float) -> Finished | None:
        """Queues it, or says at once how it ended. Its key must not be in use."""
        assert request.key not in self._requests, f"request key {request.key} is in use"
        self._num_arrived += 1
        request.order = self._num_arrived
        request.queue_key = (request.priority if self.config.policy == "priority" else 0, request.order)
        request.received_s = now
        if request.pooling_params is None:
            request.max_total_tokens = min(request.max_total_tokens, self.max_model_len)
        refusal = self._refusal(request)
        if refusal is not None:
            request.status = RequestStatus.FINISHED
            return refusal
        self._requests[request.key] = request
        # Else a queue of chats that are nearly all cached would look long to a balancer, and repel those that belong here.
        request.num_expected_tokens = self.kv_cache.num_cached_tokens(request)
        self._waiting.add(request)
        self._count(request, 1)
        return None

    def _refusal(self, request: Request) -> Finished | None:
        num_tokens, config, kv, to_come = request.num_tokens, self.config, self.kv_cache, request.num_tokens_to_come
        if num_tokens == 0:
            return Finished(FinishReason.ERROR, error="the prompt is empty")
        prompt = f"a prompt of {counted(num_tokens, 'token')}"
        if num_tokens + to_come > config.max_model_len:
            problem = "leaves no room for output" if to_come else "is too long"
            message = f"{prompt} {problem}: the model takes {config.max_model_len} in all"
            return Finished(FinishReason.ERROR, error=message)
        if num_tokens + to_come > kv.num_tokens_capacity:
            num_needed, and_one = kv.num_blocks_for(num_tokens + to_come), " and one of output" * to_come
            message = (
                f"{prompt}{and_one} need {num_needed} KV cache blocks of {kv.block_size} tokens, there are {kv.num_blocks}"
            )
            return Finished(FinishReason.ERROR, error=message)
        if num_tokens >= request.max_total_tokens:  # continued from elsewhere, where it had just used up its budget
            return Finished(FinishReason.LENGTH)
        return None

    def abort(self, key: RequestKey) -> Request | None:
        """Ends a request in whatever state it is. None when it is unknown or has ended already."""
        request = self._requests.get(key)
        if request is not None:
            self._finish(request)
        return request

    def reset_prefix_cache(self) -> None:
        self.kv_cache.reset_prefix_cache()

    def preempt_all(self) -> None:
        """What running requests have computed is void; they go back to their places in the queue and lose no token."""
        for request in list(self._running):
            self._preempt(request)

    # --- one step -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """The next batch. Empty only when there is no work."""
        self._num_prompt_logprobs_left = self.config.max_num_prompt_logprobs
        if self._has_inversion:
            self._make_way()
        num_preemptions = self._num_preemptions
        batch = self._schedule_decodes()
        num_decodes = len(batch)
        budget = self.config.max_num_batched_tokens - num_decodes
        may_admit = self._num_preemptions == num_preemptions  # else blocks are short, and the head of the queue is a victim
        budget -= self._schedule_prompts(batch, budget, now if may_admit else None)
        assert batch or not self._requests, "there is work but nothing was scheduled"
        return SchedulerOutput(batch, num_decodes, self.config.max_num_batched_tokens - budget)

    @property
    def _has_inversion(self) -> bool:
        return bool(self._waiting and self._running) and self._waiting[0].queue_key[0] < self._running[-1].queue_key[0]

    def _make_way(self) -> None:
        """Preempts those who give way to more urgent ones."""
        loras, num_running = self.loras, len(self._running)
        room = Room(
            kv_cache=self.kv_cache,
            num_places=self._max_num_running - num_running,
            num_running=num_running,
            num_blocks=self.kv_cache.num_blocks_free,
            max_loras=self.config.max_loras,
            pinned_loras=loras.pinned,
            loras=loras.counts(),
        )
        waiting = itertools.islice(self._waiting, MAX_LOOK_AHEAD)
        for victim in who_gives_way(waiting, self._running, room, self.config.max_num_batched_tokens - num_running):
            self._preempt(victim)

    def _schedule_decodes(self) -> list[ScheduledRequest]:
        batch, running, index = [], self._running, 0
        while index < len(running):  # preemption shortens the list at its end while we walk
            request = running[index]
            index += 1
            if request.is_decoding and self._grow(request):
                self.kv_cache.enter_cache(request, request.num_tokens)
                batch.append(ScheduledRequest(request, 1, True))
        return batch

    def _grow(self, request: Request) -> bool:
        """A block for the request's newest token, taken from the last of the running if need be. False: that was itself."""
        while not self.kv_cache.grow(request):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._count(request, -1)
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        self._count(request, 1)
        self._waiting.add(request)
        self._num_preemptions += 1

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self.kv_cache.free(request)
        if request.lora_id is not None:
            self.loras.remove(request.lora_id)

    def _schedule_prompts(self, batch: list[ScheduledRequest], budget: int, now: float | None) -> int:
        """Prompts in chunks, those begun before new ones of their priority. Without `now` none is begun. The tokens taken."""
        left = budget
        if self._num_decodes < len(self._running):
            for request in [r for r in self._running if not r.is_decoding]:
                if now is not None:
                    left -= self._admit(batch, left, now, better_than=request.queue_key[0])
                if left:
                    left -= self._append_chunk(batch, request, left)
        if now is not None:
            left -= self._admit(batch, left, now)
        return budget - left

    def _admit(self, batch: list[ScheduledRequest], budget: int, now: float, *, better_than: float = float("inf")) -> int:
        """Begins prompts from the head of the queue on, as far as their priority is `better_than` that. The tokens taken."""
        left, index = budget, 0
        passed: Request | None = None  # the first that waits for a slot for its adapter
        while left and len(self._running) < self._max_num_running and index < min(len(self._waiting), MAX_LOOK_AHEAD):
            request = self._waiting[index]
            if request.queue_key[0] >= better_than:
                break
            if request.needs_prompt_logprobs and not self._num_prompt_logprobs_left:
                break
            if not self._has_slot(request, passed):
                passed = passed or request
                index += 1
                continue
            if self.config.whole_prompts and request.num_tokens > left:
                break
            # One spare block for each running sequence, which will soon ask for it: else we admit now and preempt a step later.
            self._count(request, -1)
            admitted = self.kv_cache.admit(request, num_spare=len(self._running))
            if admitted:
                request.num_expected_tokens = 0  # now it is known
            self._count(request, 1)  # less by what the cache had
            if not admitted:
                break
            self._begin_running(request)
            if request.first_scheduled_s is None:
                self._note_first_admission(request, now)
            if passed is not None and request.lora_id is not None:
                passed.num_passed_over += 1
            left -= self._append_chunk(batch, request, left)
        return budget - left

    def _has_slot(self, request: Request, passed: Request | None) -> bool:
        """Whether the request's adapter may be used in the next steps, although `passed` waits before it for a slot."""
        if request.lora_id is None:
            return True
        if passed is not None and passed.num_passed_over >= MAX_PASSED_OVER and request.lora_id == self.loras.next_to_leave():
            return False
        return self.loras.has_room(request.lora_id)

    def _begin_running(self, request: Request) -> None:
        self._waiting.remove(request)
        self._running.add(request)
        request.status = RequestStatus.RUNNING
        if request.lora_id is not None:
            self.loras.add(request.lora_id)

    def _append_chunk(self, batch: list[ScheduledRequest], request: Request, budget: int) -> int:
        num_left = request.num_tokens - request.num_computed_tokens
        num_tokens = min(num_left, budget)
        if request.needs_prompt_logprobs:
            num_tokens = min(num_tokens, self._num_prompt_logprobs_left)
            self._num_prompt_logprobs_left -= num_tokens
            if num_tokens == 0:
                return 0
        self.kv_cache.enter_cache(request, request.num_computed_tokens + num_tokens)
        batch.append(ScheduledRequest(request, num_tokens, num_tokens == num_left))
        return num_tokens

    def _note_first_admission(self, request: Request, now: float) -> None:
        request.first_scheduled_s = now
        request.num_cached_tokens = request.num_computed_tokens
        self._num_prompt_tokens += request.num_cached_tokens
        if self.kv_cache.enable_prefix_caching:
            self._prefix_cache_queries += request.num_tokens
            self._prefix_cache_hits += request.num_cached_tokens

    def update(self, batch: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        """Books what the runner computed. Requests aborted meanwhile are passed over: their token is void."""
        self._num_steps += 1
        updates: list[RequestUpdate] = []
        index = -1  # among those that sample
        for position, scheduled in enumerate(batch.scheduled):
            request = scheduled.request
            index += scheduled.samples
            if request.status is not RequestStatus.RUNNING:
                continue
            is_deferred = scheduled.samples and index in output.deferred
            if position < batch.num_decodes and not is_deferred:
                request.num_computed_tokens += 1  # changes no counter: this is the loop that runs once per token
            else:
                self._book_prefill(request, scheduled.num_tokens - is_deferred)  # what is deferred is computed again
            prompt_logprobs = output.prompt_logprobs.get(position) if output.prompt_logprobs else None
            if scheduled.samples and not is_deferred:
                updates.append(self._book_token(request, index, output))
                updates[-1].prompt_logprobs = prompt_logprobs
            elif prompt_logprobs is not None:
                updates.append(RequestUpdate(request, None, prompt_logprobs=prompt_logprobs))
        return updates

    def _book_prefill(self, request: Request, num_tokens: int) -> None:
        self._count(request, -1)
        request.num_computed_tokens += num_tokens
        self._count(request, 1)
        if not request.has_sampled:  # else it is computed again after a preemption
            self._num_prompt_tokens += num_tokens
        if request.num_computed_tokens >= request.num_original_prompt_tokens - 1:
            request.needs_prompt_logprobs = False

    def _book_token(self, request: Request, index: int, output: ModelRunnerOutput) -> RequestUpdate:
        error = output.errors.get(index) if output.errors else None
        if error is not None:
            update = RequestUpdate(request, None, finished=Finished(FinishReason.ERROR, error=error))
        elif request.pooling_params is not None:
            ended = Finished(FinishReason.STOP)
            update = RequestUpdate(request, None, is_first=True, finished=ended, vector=output.vectors[index])
        else:
            token_id = output.token_ids[index]
            request.token_ids.append(token_id)
            self._num_generation_tokens += 1
            finished = _finished(request, token_id)
            if (
                output.completed
                and index in output.completed
                and (finished is None or finished.reason is not FinishReason.STOP)
            ):
                finished = Finished(FinishReason.STOP)
            update = RequestUpdate(request, token_id, not request.has_sampled, finished)
            request.has_sampled = True
            if output.logprobs:
                update.logprobs = output.logprobs.get(index)
        if update.finished is not None:
            self._finish(request)
        return update

    def _finish(self, request: Request) -> None:
        del self._requests[request.key]
        self._count(request, -1)
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def _count(self, request: Request, sign: int) -> None:
        """Adds or takes away a request's share of the load, as it now is. With all tokens computed, a new one comes."""
        if request.is_decoding or request.num_computed_tokens == request.num_tokens:
            self._num_decodes += sign
        else:
            self._num_prefill_tokens += sign * request.num_tokens_to_compute

    def check_invariants(self) -> None:
        waiting, running = list(self._waiting), list(self._running)
        assert {id(r) for r in waiting + running} == {id(r) for r in self._requests.values()}
        for queue in (waiting, running):
            assert [r.queue_key for r in queue] == sorted(r.queue_key for r in queue)
        assert all(r.status is RequestStatus.RUNNING and r.block_ids for r in running)
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and not r.block_ids for r in waiting)
        assert all(r.num_computed_tokens < r.num_tokens < r.max_total_tokens for r in running + waiting)
        assert len(running) <= self._max_num_running
        self.loras.check_invariants(r.lora_id for r in running if r.lora_id is not None)
        assert self._num_decodes == sum(r.is_decoding for r in running)
        assert self._num_prefill_tokens == sum(r.num_tokens_to_compute for r in waiting + running if not r.is_decoding)
        self.kv_cache.check_invariants(running)


def _finished(request: Request, token_id: int) -> Finished | None:
    """Whether the token just appended ends the request. `min_tokens` is kept by the sampler's mask, and here once more."""
    if token_id in request.stop_ids and request.num_output_tokens >= request.sampling_params.min_tokens:
        return Finished(FinishReason.STOP, stop_token_id=token_id)
    if request.num_tokens >= request.max_total_tokens:
        return Finished(FinishReason.LENGTH)
    return None

"""vLLM's own engine inside our core process: its scheduler, cache and model runner behind our commands and outputs.

Theory of operation
-------------------
vLLM's `EngineCore` runs in this process and thread. A step of ours is one of its; the outputs are put into our words, and so is
what it has to do, which a balancer wants to know. Each request is known to it by a name that is never used twice. What it still
says of one that was aborted is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cores.block_hash import BlockHash
from cores.cache_watch import CacheChanges
from cores.lora import RunningLoras
from cores.messages import Finished, FinishReason, RankLoad, SchedulerStats
from cores.request import Request, RequestKey
from cores.scheduler import RequestUpdate
from cores.step_engine import StepResult
from cores.utilities import OperationRefusedError
from cores.vllm_cache import VllmCache
from cores.vllm_mapping import finished, prompt_logprobs_chunk, token_logprobs

MAX_STEPS_TO_SETTLE = 16  # after the last request: what was in flight, and the news of its end
NOTHING_TO_DO_S = 0.001  # a grammar is compiling in another thread, say


class RequestRefusedError(Exception):
    """vLLM does not take this request; the message says why."""


@dataclass(slots=True, eq=False)
class _Hosted:
    request: Request
    name: str
    theirs: Any  # vLLM's own `Request`, which it keeps up to date
    num_computed: int = 0  # of the prompt, as of the last step
    num_preemptions: int = 0


class VllmEngine:
    """A `StepEngine`. `core` is vLLM's `EngineCore`, `make_request` gives its request for one of ours, under a name, `cache`
    hears of its cache."""

    def __init__(
        self,
        core: Any,
        make_request: Callable[[str, Request], Any],
        cache: VllmCache,
        max_model_len: int,
        num_kv_blocks: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.loras = RunningLoras(0)
        self.max_model_len = max_model_len
        self._core = core
        self._make_request = make_request
        self._cache = cache
        self._num_kv_blocks = num_kv_blocks
        self._sleep = sleep
        self._num_arrived = 0
        self._by_key: dict[RequestKey, _Hosted] = {}
        self._by_name: dict[str, _Hosted] = {}
        self._prefilling: dict[str, _Hosted] = {}  # by name: those without a token yet, waiting ones too
        self._num_prefill_tokens = 0  # of them, still to be computed
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_cached_tokens = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._by_key)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def request_keys(self) -> list[RequestKey]:
        return list(self._by_key)

    def lora_ids(self) -> set[str]:
        return set()

    def load(self, step_ms: float = 0.0, prefill_tokens_per_s: float = 0.0, decode_tokens_per_s: float = 0.0) -> RankLoad:
        scheduler = self._core.scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        return RankLoad(
            num_waiting, num_running, self._num_prefill_tokens, len(self._by_key) - len(self._prefilling),
            round(scheduler.get_kv_cache_usage() * self._num_kv_blocks), self._num_kv_blocks,
            step_ms, prefill_tokens_per_s, decode_tokens_per_s,
        )  # fmt: skip

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            self._num_steps, self._num_arrived, self._num_prompt_tokens, self._num_generation_tokens,
            self._num_prompt_tokens, self._num_cached_tokens, self._num_preemptions,
        )  # fmt: skip

    # --- arrivals and departures --------------------------------------------------------------------------------------

    def add_request(self, request: Request, now: float) -> Finished | None:
        request.received_s = now
        if request.num_tokens >= request.max_total_tokens and request.num_output_tokens:
            return Finished(FinishReason.LENGTH)  # continued from elsewhere, where it had just used up its budget
        self._num_arrived += 1
        name = f"{self._num_arrived}-{request.request_id}"
        try:
            theirs = self._make_request(name, request)
            self._core.add_request(theirs)
        except RequestRefusedError as refusal:
            return Finished(FinishReason.ERROR, error=str(refusal))
        hosted = _Hosted(request, name, theirs)
        self._by_key[request.key] = self._by_name[name] = self._prefilling[name] = hosted
        self._num_prefill_tokens += request.num_prompt_tokens
        return None

    def abort(self, key: RequestKey) -> Request | None:
        hosted = self._by_key.get(key)
        if hosted is None:
            return None
        self._forget(hosted)
        self._core.abort_requests([hosted.name])
        return hosted.request

    def _forget(self, hosted: _Hosted) -> None:
        del self._by_key[hosted.request.key], self._by_name[hosted.name]
        self._leave_prefill(hosted)

    def _leave_prefill(self, hosted: _Hosted) -> None:
        if self._prefilling.pop(hosted.name, None) is not None:
            self._num_prefill_tokens -= hosted.request.num_prompt_tokens - hosted.num_computed

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> StepResult:
        outputs = self._run()
        self._num_steps += 1
        cached = {output.request_id: output.prefill_stats.num_cached_tokens for output in outputs if output.prefill_stats}
        num_prefill_tokens = self._note_progress(now, cached)
        updates: list[RequestUpdate] = []
        num_decodes = 0
        for output in outputs:
            hosted = self._by_name.get(output.request_id)
            if hosted is not None:  # else it was aborted, and its token is void
                num_decodes += hosted.request.has_sampled
                updates += self._updates(hosted, output)
        self._settle()
        return StepResult(updates, num_prefill_tokens, num_decodes)

    def _run(self) -> list[Any]:
        """The outputs of the next batch to end. Where vLLM hands in a batch before the last one has ended, that takes two calls
        at first."""
        while True:
            outputs, was_executed = self._core.step_fn()
            self._core.post_step(was_executed)
            if outputs is None and was_executed:
                continue
            if not was_executed and not outputs and self._by_key:
                self._sleep(NOTHING_TO_DO_S)
            return [output for batch in (outputs or {}).values() for output in batch.outputs]

    def _note_progress(self, now: float, cached: dict[str, int]) -> int:
        """How many prompt tokens the step computed: not those that the cache had, which an output tells or vLLM's request."""
        num_tokens = 0
        for name, hosted in self._prefilling.items():
            request = hosted.request
            num_computed = min(hosted.theirs.num_computed_tokens, request.num_prompt_tokens)
            num_new = num_computed - hosted.num_computed
            if num_new and request.first_scheduled_s is None:
                stats = hosted.theirs.prefill_stats
                request.first_scheduled_s = now
                request.num_cached_tokens = cached.get(name, stats.num_cached_tokens if stats else 0)
                num_tokens -= request.num_cached_tokens
            hosted.num_computed = num_computed
            self._num_prefill_tokens -= num_new
            num_tokens += max(0, num_new)  # negative: it was preempted
        return max(0, num_tokens)

    def _updates(self, hosted: _Hosted, output: Any) -> list[RequestUpdate]:
        """One for each token; the last one has what comes once."""
        request, token_ids = hosted.request, list(output.new_token_ids)
        self._num_preemptions += hosted.theirs.num_preemptions - hosted.num_preemptions
        hosted.num_preemptions = hosted.theirs.num_preemptions
        updates = [RequestUpdate(request, token_id) for token_id in token_ids] or [RequestUpdate(request, None)]
        if token_ids and not request.has_sampled:
            self._on_first_token(hosted)
            updates[0].is_first = True
        self._num_generation_tokens += len(token_ids)
        if output.new_logprobs is not None and request.sampling_params.logprobs is not None:
            lists, num_top = output.new_logprobs, request.sampling_params.logprobs
            for i, update in enumerate(updates[: len(token_ids)]):
                ids, logprobs = lists.logprob_token_ids[i].tolist(), lists.logprobs[i].tolist()
                update.logprobs = token_logprobs(ids, logprobs, int(lists.sampled_token_ranks[i]), num_top)
        tensors = output.new_prompt_logprobs_tensors
        if tensors is not None and request.sampling_params.prompt_logprobs is not None:
            updates[0].prompt_logprobs = prompt_logprobs_chunk(
                tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), tensors.selected_token_ranks.tolist(),
                request.sampling_params.prompt_logprobs,
            )  # fmt: skip
        reason = None if output.finish_reason is None else str(output.finish_reason)
        updates[-1].finished = finished(reason, output.stop_reason, token_ids)
        if reason is not None:
            self._forget(hosted)
        return updates

    def _on_first_token(self, hosted: _Hosted) -> None:
        request = hosted.request
        request.has_sampled = True
        request.first_scheduled_s = request.first_scheduled_s or request.received_s  # preempted in the same breath
        self._leave_prefill(hosted)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_cached_tokens += request.num_cached_tokens

    def _settle(self) -> None:
        """After the last request vLLM has a batch in flight, or an end to tell its runner, for which we would not step it."""
        for _ in range(MAX_STEPS_TO_SETTLE):
            if self._by_key or not (self._core.scheduler.has_requests() or self._core.batch_queue):
                return
            _, was_executed = self._core.step_fn()
            self._core.post_step(was_executed)

    # --- caches -------------------------------------------------------------------------------------------------------

    def preempt_all(self) -> None:
        """vLLM does it together with forgetting its cache."""
        self._settle()
        self._core.reset_prefix_cache(reset_running_requests=True)
        self._cache.clear()

    def reset_prefix_cache(self) -> None:
        self._settle()
        if not self._core.reset_prefix_cache():
            raise OperationRefusedError(
                "vLLM forgets its prefix cache only while no request holds any of it: try later, or with reset_running_requests"
            )
        self._cache.clear()  # vLLM's own word for it comes with its next step

    def record_cache_changes(self, changes: CacheChanges | None) -> None:
        self._cache.changes = changes

    def cached_landmarks(self) -> Iterable[BlockHash]:
        return self._cache.cached_landmarks()

    def check_invariants(self) -> None:
        assert {id(hosted) for hosted in self._by_key.values()} == {id(hosted) for hosted in self._by_name.values()}
        assert self._prefilling.keys() <= self._by_name.keys()
        assert self._num_prefill_tokens == sum(
            hosted.request.num_prompt_tokens - hosted.num_computed for hosted in self._prefilling.values()
        )
        assert all(not hosted.request.has_sampled for hosted in self._prefilling.values())

"""What an engine core asks of whatever holds its requests and computes their next tokens: ours, or an engine that is hosted.

Ours is the scheduler with a model runner. A hosted engine has both of its own, and takes requests and gives tokens whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cores.block_hash import BlockHash
from cores.cache_watch import CacheChanges
from cores.config import EngineConfig
from cores.kv_cache_manager import KVCacheManager
from cores.lora import RunningLoras
from cores.messages import Finished, RankLoad, SchedulerStats
from cores.request import Request, RequestKey
from cores.runner.interface import ModelInfo, ModelRunner, RunnerOperations
from cores.scheduler import RequestUpdate, Scheduler, SchedulerConfig

MAX_PROMPT_LOGITS = 2**26  # of one step, for log-probabilities of prompts: 256 MiB of float32


class StepResult(NamedTuple):
    updates: list[RequestUpdate]
    num_prefill_tokens: int  # computed in this step
    num_decodes: int


class StepEngine(Protocol):
    """All methods are called from the thread that steps the engine. `Scheduler` says what each does."""

    loras: RunningLoras

    @property
    def max_model_len(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def __contains__(self, key: RequestKey) -> bool: ...

    def request_keys(self) -> list[RequestKey]: ...

    def lora_ids(self) -> set[str]: ...

    def load(self, step_ms: float = 0.0, prefill_tokens_per_s: float = 0.0, decode_tokens_per_s: float = 0.0) -> RankLoad: ...

    def stats(self) -> SchedulerStats: ...

    def add_request(self, request: Request, now: float) -> Finished | None: ...

    def abort(self, key: RequestKey) -> Request | None: ...

    def step(self, now: float) -> StepResult:
        """Computes one batch. An exception is the engine's death: errors of one request end that request."""
        ...

    def preempt_all(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def record_cache_changes(self, changes: CacheChanges | None) -> None:
        """Where the prefix cache is to note its changes; None: nowhere."""
        ...

    def cached_landmarks(self) -> Iterable[BlockHash]:
        """What is in the prefix cache now, while its changes are noted."""
        ...

    def check_invariants(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """An engine that brings scheduler and model runner in one."""

    engine: StepEngine
    operations: RunnerOperations


class ScheduledRunner(Scheduler):
    """Ours: the scheduler, with the runner that computes its batches."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, runner: ModelRunner) -> None:
        super().__init__(config, kv_cache)
        self._runner = runner

    def step(self, now: float) -> StepResult:
        batch = self.schedule(now)
        updates = self.update(batch, self._runner.execute(batch))
        return StepResult(updates, batch.num_tokens - batch.num_decodes, batch.num_decodes)

    def record_cache_changes(self, changes: CacheChanges | None) -> None:
        self.kv_cache.record_changes(changes)

    def cached_landmarks(self) -> Iterable[BlockHash]:
        return self.kv_cache.cached_landmarks()


def make_step_engine(config: EngineConfig, info: ModelInfo, runner: ModelRunner) -> ScheduledRunner:
    scheduler_config = SchedulerConfig(
        max_model_len=info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_prompt_logprobs=max(16, MAX_PROMPT_LOGITS // info.vocab_size),
        policy=config.scheduling_policy,
        max_loras=config.max_loras if config.enable_lora else 0,
        whole_prompts=info.needs_whole_prompts,
    )
    kv_cache = KVCacheManager(info.num_kv_blocks, info.block_size, config.enable_prefix_caching)
    return ScheduledRunner(scheduler_config, kv_cache, runner)

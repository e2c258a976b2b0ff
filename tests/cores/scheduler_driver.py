"""A scheduler with a model beside it that says what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cores.kv_cache_manager import KVCacheManager
from cores.messages import EngineCoreRequest, Finished
from cores.request import Request
from cores.runner.interface import ModelRunnerOutput
from cores.scheduler import RequestUpdate, Scheduler, SchedulerConfig

EOS, STOP_ID, TOKEN = 2, 77, 9


class Driver:
    """A scheduler with its steps: each sampled token is what `choose` says."""

    def __init__(self, *, num_blocks: int = 100, block_size: int = 4, max_model_len: int = 200, **config: Any) -> None:
        kv_cache = KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=max_model_len, **config), kv_cache)
        self.choose: Callable[[Request], int] = lambda request: TOKEN
        self.errors: dict[int, str] = {}
        self.deferred: frozenset[int] = frozenset()
        self.completed: set[int] = set()
        self.vectors: dict[int, bytes] = {}
        self.now = 0.0

    def add(self, message: EngineCoreRequest) -> Request:
        request = Request.from_engine_core_request(0, message, self.scheduler.max_model_len, (EOS,), message.lora_id)
        assert self.scheduler.add_request(request, self.now) is None
        return request

    def refuse(self, message: EngineCoreRequest) -> Finished:
        request = Request.from_engine_core_request(0, message, self.scheduler.max_model_len, (EOS,))
        finished = self.scheduler.add_request(request, self.now)
        assert finished is not None
        assert not self.scheduler.has_work
        return finished

    def step(self) -> list[tuple[int, int]]:
        """(handle, tokens computed) of the batch, in order."""
        batch = self.scheduler.schedule(self.now)
        sampling = [s.request for s in batch.scheduled if s.samples]
        described = [(s.request.key[1], s.num_tokens) for s in batch.scheduled]
        output = ModelRunnerOutput(
            [self.choose(r) for r in sampling],
            errors=self.errors,
            vectors=self.vectors,
            deferred=self.deferred,
            completed=self.completed,
        )
        self.updates: list[RequestUpdate] = self.scheduler.update(batch, output)
        self.scheduler.check_invariants()
        self.now += 1.0
        return described

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

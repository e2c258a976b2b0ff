"""Our commands and outputs around an engine that has the methods of vLLM's. The real one: `tests/e2e/test_vllm.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreOutputs, EngineState, Finished, FinishReason, FirstToken, RankId, UtilityCall
from cores.request import Request
from cores.runner.interface import ModelInfo
from cores.step_engine import HostedEngine
from cores.testing import ManualClock, make_request
from cores.vllm_cache import VllmCache
from cores.vllm_engine_core import RequestRefusedError, VllmEngine
from cores.vllm_loader import replay_grammar, set_environment, warm_up
from cores.vllm_operations import VllmOperations

RANK = RankId(0, 1)
BLOCK_SIZE, NUM_BLOCKS, BUDGET = 4, 100, 16


@dataclass(eq=False)
class FakeRequest:
    """Has what we read of vLLM's."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_cached: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    prefill_stats: Any = None


@dataclass
class FakeVllm:
    """Takes prompts in chunks of `BUDGET` tokens, one after the other; token i of a request is i. Pipelined: it takes a batch
    before it gives the outputs of the one before."""

    is_pipelined: bool = False
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    batch_queue: list[list[Any]] = field(default_factory=list)
    has_ends_to_tell: bool = False
    failing: Exception | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def scheduler(self) -> FakeVllm:
        return self

    @property
    def model_executor(self) -> FakeVllm:
        return self

    # --- its scheduler ---

    def get_request_counts(self) -> tuple[int, int]:
        num_running = sum(r.num_computed_tokens > 0 for r in self.requests.values())
        return num_running, len(self.requests) - num_running

    def get_kv_cache_usage(self) -> float:
        return sum(-(-r.num_computed_tokens // BLOCK_SIZE) for r in self.requests.values()) / NUM_BLOCKS

    def has_requests(self) -> bool:
        return bool(self.requests) or self.has_ends_to_tell

    # --- its core ---

    def add_request(self, request: FakeRequest) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]
            self.has_ends_to_tell = True

    def step_fn(self) -> tuple[dict[int, Any] | None, bool]:
        if self.failing is not None:
            raise self.failing
        self.has_ends_to_tell = False
        outputs = self._compute()
        if not self.is_pipelined:
            return {0: SimpleNamespace(outputs=outputs)}, True
        was_empty = not self.batch_queue
        if outputs:
            self.batch_queue.append(outputs)
            if was_empty:
                return None, True
        return {0: SimpleNamespace(outputs=self.batch_queue.pop(0))} if self.batch_queue else {}, bool(outputs)

    def post_step(self, was_executed: bool) -> None:
        assert isinstance(was_executed, bool)

    def _compute(self) -> list[Any]:
        budget, outputs = BUDGET, []
        for request in list(self.requests.values()):
            if not request.num_computed_tokens:
                request.num_computed_tokens = request.num_cached
                request.prefill_stats = SimpleNamespace(num_cached_tokens=request.num_cached)
            left = max(1, request.num_prompt_tokens - request.num_computed_tokens)
            chunk = min(left, budget)
            budget -= chunk
            request.num_computed_tokens += chunk
            if chunk == left:
                outputs.append(self._token(request))
        return outputs

    def _token(self, request: FakeRequest) -> Any:
        request.num_output_tokens += 1
        stats, request.prefill_stats = request.prefill_stats, None
        is_over = request.num_output_tokens == request.max_tokens
        if is_over:
            del self.requests[request.request_id]
            self.has_ends_to_tell = True
        return SimpleNamespace(
            request_id=request.request_id, new_token_ids=[request.num_output_tokens], prefill_stats=stats, stop_reason=None,
            finish_reason="length" if is_over else None, new_logprobs=None, new_prompt_logprobs_tensors=None,
        )  # fmt: skip

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        if reset_running_requests:
            for request in self.requests.values():
                request.num_computed_tokens = 0
                request.num_preemptions += 1
        return not any(request.num_computed_tokens for request in self.requests.values())

    # --- its workers ---

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def collective_rpc(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> list[Any]:
        self.calls.append((name, *args))
        return [name]

    def profile(self, is_start: bool) -> None:
        self.calls.append(("profile", is_start))


class Engine:
    """An engine core around a `FakeVllm`. `num_cached`: so many tokens of each prompt are in its cache."""

    def __init__(
        self, vllm: FakeVllm | None = None, *, num_cached: int = 0, no_sleep: str = "", profile_dir: str | None = None
    ) -> None:
        self.vllm = vllm or FakeVllm()
        self.clock = ManualClock(100.0)
        self.refuse: Callable[[Request], str | None] = lambda request: None
        self._num_cached = num_cached
        info = ModelInfo("cpu", 200, 1000, (2,), NUM_BLOCKS, BLOCK_SIZE, no_sleep=no_sleep)
        self.engine = VllmEngine(self.vllm, self._make, VllmCache(BLOCK_SIZE), 200, NUM_BLOCKS, sleep=self.clock.sleep)
        hosted = HostedEngine(self.engine, VllmOperations(self.vllm))
        config = EngineConfig(model="m", engine="vllm", profile_dir=profile_dir)
        self.core = EngineCore(RANK, config, info, hosted, self.clock)

    def _make(self, name: str, request: Request) -> FakeRequest:
        if reason := self.refuse(request):
            raise RequestRefusedError(reason)
        num_tokens = request.num_tokens
        return FakeRequest(name, num_tokens, request.max_total_tokens - num_tokens, min(self._num_cached, num_tokens - 1))

    def step(self) -> EngineCoreOutputs:
        (outputs,) = self.core.step().values()
        self.core.check_invariants()
        return outputs

    def run(self) -> dict[int, list[int]]:
        """All tokens by handle."""
        tokens: dict[int, list[int]] = {}
        while self.core.has_work:
            for outputs in self.core.step().values():
                counts = outputs.counts or [1] * len(outputs.handles)
                row_tokens = iter(outputs.token_ids)
                for handle, count in zip(outputs.handles, counts, strict=True):
                    tokens.setdefault(handle, []).extend(next(row_tokens) for _ in range(count))
            self.core.check_invariants()
        return tokens

    def call(self, method: str, *args: Any) -> Any:
        result = self.core.call_utility(UtilityCall(1, 1, method, args))
        assert result is not None
        return result


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_every_token_comes_once_and_the_end_with_the_last(is_pipelined: bool) -> None:
    engine = Engine(FakeVllm(is_pipelined))
    engine.core.add_request(0, make_request(1, prompt=5, max_tokens=3))
    engine.core.add_request(0, make_request(2, prompt=40, max_tokens=2))
    assert engine.run() == {1: [1, 2, 3], 2: [1, 2]}
    assert not engine.vllm.batch_queue
    assert not engine.vllm.has_ends_to_tell, "vLLM's runner was never told of the last end"
    assert engine.core.load().num_kv_blocks_used == 0


def test_the_load_is_what_is_still_to_be_computed() -> None:
    engine = Engine()
    engine.core.add_request(0, make_request(1, prompt=20, max_tokens=3))
    engine.core.add_request(0, make_request(2, prompt=10, max_tokens=3))
    loads = [engine.core.load()]
    engine.core.step()  # 16 tokens: the first prompt's chunk
    loads.append(engine.core.load())
    engine.step()  # the last 4, and all 10 of the second
    loads.append(engine.core.load())
    seen = [(ld.num_waiting, ld.num_running, ld.num_prefill_tokens, ld.num_decodes, ld.num_kv_blocks_used) for ld in loads]
    assert seen == [(2, 0, 30, 0, 0), (1, 1, 14, 0, 4), (0, 2, 0, 2, 8)]
    assert loads[-1].num_kv_blocks == NUM_BLOCKS


def test_cached_tokens_are_told_with_the_first_token_and_count_as_hits() -> None:
    engine = Engine(num_cached=8)
    engine.core.add_request(0, make_request(1, prompt=30, max_tokens=1))
    engine.clock.now += 2.0
    assert engine.core.step() == {}
    outputs = engine.step()
    assert outputs.first_tokens == {0: FirstToken(num_cached_tokens=8, queued_s=2.0)}
    stats = engine.core.stats()
    assert (stats.num_prompt_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits) == (30, 30, 8)
    assert (stats.num_requests, stats.num_generation_tokens, stats.num_steps) == (1, 1, 2)


def test_step_times_count_computed_prompt_tokens_without_cached_ones() -> None:
    engine = Engine(num_cached=8)
    engine.core.add_request(0, make_request(1, prompt=30, max_tokens=2))
    request = engine.engine
    assert [request.step(0.0)[1:] for _ in range(3)] == [(16, 0), (6, 0), (0, 1)]


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_an_aborted_request_says_nothing_more_and_the_others_go_on(is_pipelined: bool) -> None:
    engine = Engine(FakeVllm(is_pipelined))
    for handle in (1, 2):
        engine.core.add_request(0, make_request(handle, prompt=4, max_tokens=4))
    engine.step()
    engine.core.abort_requests(0, [1, 77])
    assert engine.run() == {2: [2, 3, 4]}
    assert engine.core.load().num_prefill_tokens == 0


def test_a_name_is_never_used_twice_although_handles_are() -> None:
    engine = Engine()
    engine.core.add_request(0, make_request(1, max_tokens=4))
    engine.step()
    engine.core.forget_client(0)  # the next front end counts from 1 again
    engine.core.add_request(0, make_request(1, max_tokens=2))
    assert list(engine.vllm.requests) == ["2-request-1"]
    assert engine.run() == {1: [1, 2]}


def test_a_request_that_vllm_refuses_ends_alone_with_its_reason() -> None:
    engine = Engine()
    engine.refuse = lambda request: "a schema that no backend can" if request.key == (0, 1) else None
    engine.core.add_request(0, make_request(1))
    engine.core.add_request(0, make_request(2, prompt=4, max_tokens=1))
    outputs = engine.step()
    assert dict(zip(outputs.handles, (outputs.finished[row] for row in range(2)), strict=True)) == {
        1: Finished(FinishReason.ERROR, error="a schema that no backend can"),
        2: Finished(FinishReason.LENGTH),
    }


def test_a_request_that_had_all_its_tokens_before_it_moved_ends_at_once() -> None:
    engine = Engine()
    engine.core.add_request(0, make_request(1, prompt=[5] * 8, num_original_prompt_tokens=4, max_tokens=4))
    assert engine.step().finished == {0: Finished(FinishReason.LENGTH)}
    assert not engine.vllm.requests


def test_a_fault_of_vllm_is_the_engines_death() -> None:
    engine = Engine(FakeVllm(failing=RuntimeError("out of memory")))
    engine.core.add_request(0, make_request(1))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.core.step()


def test_a_step_in_which_vllm_could_not_begin_anything_is_no_busy_loop() -> None:
    engine = Engine()
    engine.core.add_request(0, make_request(1))
    engine.vllm.step_fn = lambda: ({}, False)  # type: ignore[method-assign]  # a grammar is compiling
    begin_s = engine.clock.now
    assert engine.core.step() == {}
    assert engine.clock.now > begin_s


# --- operations -------------------------------------------------------------------------------------------------------


def test_what_is_kept_over_a_pause_is_computed_again_and_loses_no_token() -> None:
    engine = Engine()
    engine.core.add_request(0, make_request(1, prompt=8, max_tokens=4))
    first = list(engine.step().token_ids)
    assert engine.call("pause", "keep").error is None
    assert (engine.core.state, engine.core.has_work) == (EngineState.PAUSED, False)
    assert engine.call("resume").error is None
    assert [*first, *engine.run()[1]] == [1, 2, 3, 4]
    assert engine.core.stats().num_preemptions == 1


def test_the_prefix_cache_is_reset_only_when_nobody_holds_any_of_it() -> None:
    engine = Engine()
    engine.core.add_request(0, make_request(1, prompt=8, max_tokens=4))
    engine.step()
    refused = engine.call("reset_prefix_cache")
    assert refused.is_refusal
    assert "reset_running_requests" in refused.error
    assert engine.call("reset_prefix_cache", True).error is None
    assert engine.run() == {1: [2, 3, 4]}
    assert engine.call("reset_prefix_cache").error is None


def test_where_vllm_cannot_sleep_nothing_is_aborted_for_it() -> None:
    engine = Engine(no_sleep="vLLM does not sleep on a CPU")
    engine.core.add_request(0, make_request(1, max_tokens=2))
    result = engine.call("sleep", 1)
    assert (result.is_refusal, result.error) == (True, "vLLM does not sleep on a CPU")
    assert engine.run() == {1: [1, 2]}


def test_weights_that_were_dropped_are_read_again_at_the_wake_up() -> None:
    engine = Engine()
    for level in (1, 2):
        engine.call("sleep", level, "keep")
        assert engine.core.state is EngineState.SLEEPING
        engine.call("wake_up")
    calls = [call for call in engine.vllm.calls if call[0] != "reset_prefix_cache"]
    awake = ("wake_up", "kv_cache", "weights")
    assert calls == [("sleep", 1), awake, ("sleep", 2), awake, ("reload_weights",)]


def test_new_weights_and_adapters_are_refused_in_words() -> None:
    engine = Engine()
    assert "no new weights" in engine.call("prepare_weights", "/elsewhere").error
    assert "no LoRA adapters" in engine.call("stage_lora", "/adapter").value["error"]


def test_collective_rpc_reaches_vllms_workers(tmp_path: Path) -> None:
    engine = Engine(profile_dir=str(tmp_path))
    assert engine.call("collective_rpc", "get_model_name", (3,)).value == ["get_model_name"]
    assert engine.call("collective_rpc", "_private").is_refusal
    assert engine.call("start_profile").error is None
    assert engine.call("stop_profile").value == str(tmp_path)
    assert engine.vllm.calls == [("get_model_name", 3), ("profile", True), ("profile", False)]


# --- loading ----------------------------------------------------------------------------------------------------------


def test_the_warm_up_computes_a_prompt_and_a_decode() -> None:
    engine = Engine()
    warm_up(engine.engine)
    assert engine.core.stats().num_generation_tokens == 2
    assert not engine.vllm.requests


def test_vllm_runs_in_our_process_and_a_users_own_settings_stay() -> None:
    environment = {"VLLM_HOST_IP": "10.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "40"}
    set_environment(environment, EngineConfig(model="m", engine="vllm", kv_cache_memory_bytes=1000), num_threads=3)
    assert environment == {
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "3",
    }


class FakeGrammar:
    """Ready after `polls` looks; accepts tokens below 10."""

    def __init__(self, polls: int = 0) -> None:
        self._polls = polls
        self.accepted: list[int] = []

    @property
    def is_grammar_ready(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    @property
    def grammar(self) -> FakeGrammar:
        return self

    def accept_tokens(self, name: str, token_ids: list[int]) -> bool:
        self.accepted += token_ids
        return max(token_ids) < 10


def test_a_grammar_has_read_what_its_request_had_elsewhere() -> None:
    grammar = FakeGrammar(polls=3)
    replay_grammar(SimpleNamespace(request_id="1", structured_output_request=grammar), [4, 5], sleep=lambda _: None)
    assert grammar.accepted == [4, 5]
    replay_grammar(SimpleNamespace(request_id="1", structured_output_request=None), [4, 5])


def test_a_grammar_that_does_not_accept_them_ends_the_request() -> None:
    theirs = SimpleNamespace(request_id="1", structured_output_request=FakeGrammar())
    with pytest.raises(RequestRefusedError, match="does not accept"):
        replay_grammar(theirs, [4, 50])

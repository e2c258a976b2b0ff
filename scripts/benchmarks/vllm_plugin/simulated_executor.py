"""For vLLM, in its own environment: an executor that takes `STEP_MS` a step and computes nothing.

All else is vLLM's own: API server, engine loop, scheduler, KV cache manager. So its front end can be measured beside ours over
the simulated engine, at the same step time and with tokens from the same pool.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import record_kv_cache_layout

from cores.runner.model_dir import read_model_dir

KV_CACHE_BYTES = 8 << 30  # never allocated


class SimulatedExecutor(Executor):
    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self._step_s = float(os.environ["STEP_MS"]) / 1000
        self._token_ids = read_model_dir(self.vllm_config.model_config.model).printable_token_ids
        self._prompt_lengths: dict[str, int] = {}
        self._num_steps = 0
        self._output: ModelRunnerOutput | None = None
        if not self.vllm_config.cache_config.block_size:
            self.vllm_config.cache_config.block_size = 16

    # --- what the engine asks at its start ------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        config = self.vllm_config.model_config.hf_config
        spec = FullAttentionSpec(
            block_size=self.vllm_config.cache_config.block_size,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.hidden_size // config.num_attention_heads,
            dtype=torch.bfloat16,
        )
        return [{f"model.layers.{i}.self_attn.attn": spec for i in range(config.num_hidden_layers)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        record_kv_cache_layout(self.vllm_config.cache_config, layout_name)

    def determine_available_memory(self) -> list[int]:
        return [KV_CACHE_BYTES]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def supports_draft_weight_updates(self) -> bool:
        return False

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        return _maybe_future([None], options.get("non_block", False))

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    # --- a step ---------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._prompt_lengths.pop(request_id, None)
        computed = {}
        for request in scheduler_output.scheduled_new_reqs:
            self._prompt_lengths[request.req_id] = len(request.prompt_token_ids)
            computed[request.req_id] = request.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        request_ids = list(scheduler_output.num_scheduled_tokens)
        tokens = [
            [self._token_id(row)]
            if computed[request_id] + scheduler_output.num_scheduled_tokens[request_id] >= self._prompt_lengths[request_id]
            else []
            for row, request_id in enumerate(request_ids)
        ]
        if request_ids:
            time.sleep(self._step_s)
            self._num_steps += 1
        rows = {request_id: row for row, request_id in enumerate(request_ids)}
        self._output = ModelRunnerOutput(req_ids=request_ids, req_id_to_index=rows, sampled_token_ids=tokens)
        return _maybe_future(self._output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _maybe_future(self._output, non_block)

    def execute_dummy_batch(self) -> None:
        pass

    def take_draft_token_ids(self) -> None:
        return None

    def _token_id(self, row: int) -> int:
        return self._token_ids[(self._num_steps * 7919 + row * 104729) % len(self._token_ids)]


def _maybe_future(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future

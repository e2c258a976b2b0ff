"""Settings, requests and outputs in vLLM's words and back. Needs no vLLM."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from cores.config import ConfigError, EngineConfig
from cores.messages import Finished, FinishReason, TokenLogprobs
from cores.request import Request
from cores.sampling_params import MAX_SEED
from cores.testing import make_request
from cores.vllm_mapping import (
    cache_salt,
    engine_args,
    finished,
    prompt_logprobs_chunk,
    sampling_args,
    token_logprobs,
)

KNOWN = ("model", "enforce_eager", "gpu_memory_utilization", "quantization")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**({"model": "m", "engine": "vllm"} | settings))


def queued(prompt: list[int], num_original: int | None = None, cache_salt: str | None = None, **params: Any) -> Request:
    request = make_request(
        prompt=prompt,
        num_original_prompt_tokens=num_original,
        cache_salt=cache_salt,
        **({"temperature": 0.0, "seed": 7, "max_tokens": 10} | params),
    )
    return Request.from_engine_core_request(0, request, max_model_len=100, eos_token_ids=(2,))


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_have_vllms_names_and_what_is_not_set_is_vllms_to_choose() -> None:
    args = engine_args(config(max_num_seqs=8, num_kv_blocks=50, enable_prefix_caching=False), KNOWN, None)
    expected = {"model": "m", "dtype": "auto", "max_num_seqs": 8, "num_gpu_blocks_override": 50, "enable_prefix_caching": False}
    assert {name: args[name] for name in expected} == expected
    assert args.keys().isdisjoint({"max_model_len", "block_size", "kv_cache_memory_bytes", "profiler_config"})
    assert args["distributed_executor_backend"] == "uni"
    assert "gpu_memory_utilization" not in args
    assert engine_args(config(gpu_memory_utilization=0.4), KNOWN, None)["gpu_memory_utilization"] == 0.4


def test_a_cpu_gets_a_cache_of_bounded_size_unless_another_is_asked_for() -> None:
    assert engine_args(config(), KNOWN, 1 << 30)["kv_cache_memory_bytes"] == 1 << 30
    assert engine_args(config(kv_cache_memory_bytes=5000), KNOWN, 1 << 30)["kv_cache_memory_bytes"] == 5000


def test_other_engine_arguments_are_json_or_text() -> None:
    words = ("enforce-eager=true", "gpu_memory_utilization=0.5", "quantization=fp8")
    args = engine_args(config(vllm_args=words), KNOWN, None)
    assert (args["enforce_eager"], args["gpu_memory_utilization"], args["quantization"]) == (True, 0.5, "fp8")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("enforce_eagr=1", "no engine argument 'enforce_eagr'; did you mean 'enforce_eager'"),
        ("enforce_eager", "takes KEY=VALUE, got 'enforce_eager'"),
        ("max_num_seqs=3", "cannot take max_num_seqs: --max-num-seqs says that"),
        ("tensor_parallel_size=2", "a rank is one process with one device"),
        ("structured_outputs_config={}", "the gateway sets it"),
    ],
)
def test_an_engine_argument_that_cannot_be_is_refused_with_the_reason(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_args(config(vllm_args=(word,)), KNOWN, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runner": "pooling"}, "--runner pooling: --engine vllm serves text only"),
        ({"enable_lora": True}, "--enable-lora: --engine vllm serves no adapters"),
        ({"engine": "torch", "vllm_args": ("a=1",)}, "--vllm-args needs --engine vllm, got --engine torch"),
    ],
)
def test_what_vllm_does_not_serve_here_is_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_sampling_parameters_keep_their_names_and_values() -> None:
    args = sampling_args(
        queued([5, 6], temperature=0.7, top_k=3, stop_token_ids=(9,), logprobs=2, bad_words=("x",), allowed_token_ids=(1, 2))
    )
    expected = {
        "temperature": 0.7, "top_k": 3, "seed": 7, "stop_token_ids": [9], "logprobs": 2, "bad_words": ["x"],
        "allowed_token_ids": [1, 2], "max_tokens": 10, "ignore_eos": True, "logit_bias": None,
    }  # fmt: skip
    assert {name: args[name] for name in expected} == expected


def test_a_continued_request_asks_for_what_is_left_of_it() -> None:
    args = sampling_args(queued([5, 6, 30, 31, 32], num_original=2, max_tokens=10, min_tokens=4, temperature=1.0))
    assert (args["max_tokens"], args["min_tokens"]) == (7, 1)
    assert args["seed"] == 10, "with the seed of its beginning it would meet the same noise again"


def test_a_seed_stays_within_its_range() -> None:
    assert sampling_args(queued([5, 6, 7], num_original=2, seed=MAX_SEED))["seed"] == 0


def test_penalties_for_tokens_that_were_generated_elsewhere_go_on_as_a_bias() -> None:
    args = sampling_args(
        queued([5, 5, 30, 30, 31], 2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={31: 2.0, 40: 1.0})
    )
    assert args["logit_bias"] == {30: -1.0, 31: 1.25, 40: 1.0}
    assert sampling_args(queued([5, 5], 2, presence_penalty=0.5))["logit_bias"] is None


def test_what_separates_caches_in_ours_separates_them_in_vllms() -> None:
    salts = {cache_salt(queued([5], cache_salt=salt)) for salt in (None, "a", "b")}
    assert len(salts) == 3
    assert None in salts


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_every_end_has_our_reason() -> None:
    assert finished(None, None, [5]) is None
    assert finished("stop", None, [5, 2]) == Finished(FinishReason.STOP, stop_token_id=2)
    assert finished("stop", 9, [9]) == Finished(FinishReason.STOP, stop_token_id=9)
    assert finished("length", None, [5]) == Finished(FinishReason.LENGTH)
    assert finished("abort", None, []) == Finished(FinishReason.ABORT)
    error = finished("error", None, [])
    assert error is not None
    assert (error.reason, "'error'" in (error.error or "")) == (FinishReason.ERROR, True)


def test_logprobs_are_cut_to_what_the_request_asked_for() -> None:
    assert token_logprobs([8, 3, 8, 4], [-2.0, -0.5, -2.0, -3.0], 2, num_top=1) == TokenLogprobs(-2.0, 2, (3,), (-0.5,))
    assert token_logprobs([8, 3], [-2.0, -0.5], 2, num_top=0) == TokenLogprobs(-2.0, 2, (), ())


def test_logprobs_of_a_prompt_begin_with_its_second_token() -> None:
    chunk = prompt_logprobs_chunk([[8, 3, 1], [9, 9, 2]], [[-2.0, -0.5, -4.0], [-1.0, -1.0, -3.0]], [2, 1], num_top=1)
    assert (chunk.start, chunk.num_top) == (1, 1)
    assert chunk.logprobs == array("f", [-2.0, -1.0])
    assert chunk.ranks == array("I", [2, 1])
    assert chunk.top_token_ids == array("I", [3, 9])
    assert chunk.top_logprobs == array("f", [-0.5, -1.0])

"""Our settings, requests and outputs in the words of vLLM, and back. Pure: plain values and numbers, no vLLM."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from cores.block_hash import ROOT
from cores.config import ConfigError, EngineConfig, did_you_mean
from cores.messages import Finished, FinishReason, PromptLogprobsChunk, TokenLogprobs
from cores.request import Request
from cores.sampling_params import MAX_SEED, SamplingParams

# What a rank is to this gateway: one process with one device, whose adapters, executor and weights are not vLLM's to choose.
_FIXED: Final[Mapping[str, Any]] = {
    "distributed_executor_backend": "uni",
    "enable_lora": False,
    # llguidance, as our front end: what has compiled there compiles here.
    "structured_outputs_config": {"backend": "guidance"},
    "disable_log_stats": True,
    "use_tqdm_on_load": False,  # stderr belongs to logging
}
_OURS: Final = (
    "model", "dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
    "enable_prefix_caching", "scheduling_policy",
)  # fmt: skip
_REFUSED: Final[Mapping[str, str]] = {
    **{name: f"--{name.replace('_', '-')} says that" for name in _OURS},
    "num_gpu_blocks_override": "--num-kv-blocks says that",
    "runner": "--runner says that",
    "profiler_config": "--profile-dir says that",
    **dict.fromkeys(_FIXED, "the gateway sets it"),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
        "a rank is one process with one device",
    ),
    **dict.fromkeys(("speculative_config", "kv_transfer_config", "kv_events_config"), "the gateway does not support it"),
}


def parse_vllm_args(words: Sequence[str]) -> dict[str, Any]:
    """From `KEY=VALUE` words, a value being JSON or else text. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    for word in words:
        key, sep, text = word.partition("=")
        key = key.replace("-", "_")
        if not sep or not key:
            raise ConfigError(f"--vllm-args takes KEY=VALUE, got {word!r}")
        if key in _REFUSED:
            raise ConfigError(f"--vllm-args cannot take {key}: {_REFUSED[key]}")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def engine_args(config: EngineConfig, known: Collection[str], cpu_kv_cache_bytes: int | None) -> dict[str, Any]:
    """Keyword arguments for vLLM's `EngineArgs`, whose names are `known`. Raises `ConfigError`.

    On a CPU vLLM would take nearly all of the machine's memory for its cache: `cpu_kv_cache_bytes` is what it gets where no
    size was asked for.
    """
    chosen = parse_vllm_args(config.vllm_args)
    if unknown := [key for key in chosen if key not in known]:
        raise ConfigError(f"--vllm-args: vLLM has no engine argument {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    args: dict[str, Any] = {name: value for name in _OURS if (value := getattr(config, name)) is not None}
    if config.num_kv_blocks is not None:
        args["num_gpu_blocks_override"] = config.num_kv_blocks
    if config.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.kv_cache_memory_bytes is None and cpu_kv_cache_bytes is not None:
        args["kv_cache_memory_bytes"] = cpu_kv_cache_bytes
    if config.profile_dir is not None:
        args["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": config.profile_dir}
    return {**args, **_FIXED, **chosen}


# --- requests ---------------------------------------------------------------------------------------------------------


def sampling_args(request: Request) -> dict[str, Any]:
    """Keyword arguments for vLLM's `SamplingParams`; the grammar is apart (`structured_outputs.as_lark`).

    To vLLM a continued request is a new one with a longer prompt. What counts from the original prompt is told to it as what
    is left.
    """
    params, num_before = request.sampling_params, request.num_output_tokens
    args: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        # With the seed that it began with, a continued request would meet the same noise again.
        "seed": None if params.seed is None else (params.seed + num_before) & MAX_SEED,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "max_tokens": request.max_total_tokens - request.num_tokens,
        "min_tokens": max(0, params.min_tokens - num_before),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "logit_bias": _logit_bias(params, request.token_ids[request.num_original_prompt_tokens :]) or None,
        "bad_words": list(params.bad_words) or None,
        "allowed_token_ids": None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        "detokenize": False,  # the front end does
    }
    return args


def _logit_bias(params: SamplingParams, earlier: Sequence[int]) -> dict[int, float]:
    """With the penalties for tokens that were generated elsewhere: to vLLM they are prompt, which these do not count.

    The frequency penalty is thereby what it was. The presence penalty is, too, until one of these tokens comes once more;
    then vLLM counts it a second time.
    """
    bias = dict(params.logit_bias or {})
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(earlier).items():
            penalty = params.presence_penalty + count * params.frequency_penalty
            bias[token_id] = bias.get(token_id, 0.0) - penalty
    return bias


def cache_salt(request: Request) -> str | None:
    """Of vLLM's prefix cache: what separates caches in ours."""
    return None if request.root_hash in (b"", ROOT) else request.root_hash.hex()


# --- outputs ----------------------------------------------------------------------------------------------------------

_REASONS = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def finished(reason: str | None, stop_reason: object, token_ids: Sequence[int]) -> Finished | None:
    """How a request ended, by vLLM's word for it. None: it goes on."""
    if reason is None:
        return None
    ours = _REASONS.get(reason, FinishReason.ERROR)
    if ours is FinishReason.STOP:  # vLLM says which of `stop_token_ids` it was, and nothing when it was EOS
        last = token_ids[-1] if token_ids else None
        return Finished(ours, stop_token_id=stop_reason if isinstance(stop_reason, int) else last)
    if ours is FinishReason.ERROR:
        return Finished(ours, error=f"vLLM ended this request with {reason!r}; the engine's log may say why")
    return Finished(ours)


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], rank: int, num_top: int) -> TokenLogprobs:
    """Of one token. It comes first, then the most likely ones: as many as the batch's most demanding request wants."""
    return TokenLogprobs(logprobs[0], rank, tuple(token_ids[1 : 1 + num_top]), tuple(logprobs[1 : 1 + num_top]))


def prompt_logprobs_chunk(
    token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], ranks: Sequence[int], num_top: int
) -> PromptLogprobsChunk:
    """Of a whole prompt, without its first token; rows as in `token_logprobs`."""
    return PromptLogprobsChunk(
        start=1,
        num_top=num_top,
        logprobs=array("f", [row[0] for row in logprobs]),
        ranks=array("I", ranks),
        top_token_ids=array("I", [token_id for row in token_ids for token_id in row[1 : 1 + num_top]]),
        top_logprobs=array("f", [logprob for row in logprobs for logprob in row[1 : 1 + num_top]]),
    )

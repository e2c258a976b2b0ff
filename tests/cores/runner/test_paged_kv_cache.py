"""How many blocks fit, and what a request's NaN may touch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cores.config import ConfigError, EngineConfig
from cores.loader import gpu_share_bytes
from cores.messages import FinishReason
from cores.runner.paged_kv_cache import CPU_MAX_BYTES, KVCacheShape, choose_num_kv_blocks
from cores.runner.testing import make_tiny_llama
from cores.testing import make_request

# 2 × 30 layers × 16 tokens × 3 heads × 64 × 2 bytes
SHAPE = KVCacheShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
GIB = 1 << 30


def choose(**settings: Any) -> int:
    defaults = {
        "free_bytes": 20 * GIB, "is_cuda": False, "max_model_len": 8192, "must_hold_model_len": False, "max_num_seqs": 256
    }  # fmt: skip
    return choose_num_kv_blocks(SHAPE, **(defaults | settings))


def test_a_block_takes_what_its_tensors_take() -> None:
    assert SHAPE.block_bytes == 368_640
    assert [SHAPE.num_blocks_for(n) for n in (1, 16, 17)] == [1, 1, 2]


def test_size_comes_from_the_settings_else_from_the_memory() -> None:
    assert choose(num_kv_blocks=1000) == 1000
    assert choose(kv_cache_memory_bytes=GIB) == GIB // 368_640
    assert choose() == 2 * GIB // 368_640
    assert choose(free_bytes=500 * GIB) == CPU_MAX_BYTES // 368_640
    assert choose(free_bytes=80 * GIB, is_cuda=True, max_num_seqs=1024) == 72 * GIB // 368_640


def test_on_a_gpu_the_largest_step_keeps_its_memory() -> None:
    on_gpu = {"free_bytes": 80 * GIB, "is_cuda": True, "max_num_seqs": 1024}
    assert choose(**on_gpu, step_bytes=4 * GIB) == 68 * GIB // 368_640
    with pytest.raises(ConfigError, match=r"0 MiB of free memory gives a KV cache of 0 blocks"):
        choose(**on_gpu, step_bytes=100 * GIB)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes \d+ needs 79872 MiB .* only 77824 MiB are free"):
        choose(**on_gpu, kv_cache_memory_bytes=78 * GIB, step_bytes=4 * GIB)


def test_a_share_of_the_gpu_is_for_the_step_and_the_cache() -> None:
    on_gpu = {"free_bytes": 70 * GIB, "is_cuda": True, "max_num_seqs": 1024, "step_bytes": 4 * GIB}
    assert choose(**on_gpu, gpu_share_bytes=30 * GIB) == 26 * GIB // 368_640
    assert choose(**on_gpu, gpu_share_bytes=30 * GIB, kv_cache_memory_bytes=GIB) == GIB // 368_640
    with pytest.raises(ConfigError, match="0 MiB of what --gpu-memory-utilization leaves gives a KV cache of 0 blocks"):
        choose(**on_gpu, gpu_share_bytes=3 * GIB)
    with pytest.raises(ConfigError, match="only 67584 MiB are free"):
        choose(**on_gpu, gpu_share_bytes=72 * GIB)


def test_a_share_of_a_gpu_is_refused_on_a_cpu() -> None:
    assert gpu_share_bytes(torch.device("cpu"), None) is None
    with pytest.raises(ConfigError, match="is for GPUs, but the model is on cpu"):
        gpu_share_bytes(torch.device("cpu"), 0.9)
    for where in ({"device": "cpu"}, {"engine": "simulated"}):
        with pytest.raises(ConfigError, match="--gpu-memory-utilization is for GPUs; with"):
            EngineConfig(gpu_memory_utilization=0.9, **where)  # type: ignore[arg-type]


def test_no_more_blocks_than_all_sequences_can_use() -> None:
    assert choose(max_num_seqs=2, max_model_len=100) == 2 * 7


def test_a_cache_that_cannot_hold_what_was_asked_for_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--num-kv-blocks 100 .* of 8192 tokens needs 512 of them \(180 MiB\)"):
        choose(num_kv_blocks=100, must_hold_model_len=True)
    assert choose(num_kv_blocks=100) == 100
    with pytest.raises(ConfigError, match=r"--num-kv-blocks 100000 needs 35156 MiB .* only 20480 MiB are free"):
        choose(num_kv_blocks=100_000)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1000 gives a KV cache of 0 blocks"):
        choose(kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match=r"2 MiB of free memory gives a KV cache of 6 blocks"):
        choose(free_bytes=24 << 20, max_model_len=1024, must_hold_model_len=True)


POISON = 100


@pytest.fixture(scope="module")
def poisoned_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token's embedding is NaN, and with it K and V of every token after it."""
    path = make_tiny_llama(tmp_path_factory.mktemp("poisoned"), tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_request_whose_values_are_nan_fails_alone_and_leaves_clean_blocks_behind(
    make_engine: Callable[..., Any], poisoned_llama: Path
) -> None:
    def engine() -> Any:
        return make_engine(poisoned_llama, num_kv_blocks=12, block_size=8, enable_prefix_caching=False)

    healthy = [make_request(i, [3 + i, 50, 60, 70, 80], max_tokens=20) for i in range(3)]
    expected = engine().run(healthy)

    shared = engine()
    shared.core.add_request(0, make_request(9, [POISON] * 24))
    for request in healthy[:1]:
        shared.core.add_request(0, request)
    (outputs,) = shared.core.step().values()
    row = list(outputs.handles).index(9)
    assert outputs.finished[row].reason is FinishReason.ERROR
    assert "not finite" in outputs.finished[row].error
    shared.core.abort_all()
    shared.core.step()

    # All of the few blocks come into use again, those of the failed request too.
    assert shared.run([make_request(10 + i, [3 + i, 50, 60, 70, 80], max_tokens=20) for i in range(3)]) == {
        10 + i: tokens for i, tokens in expected.items()
    }

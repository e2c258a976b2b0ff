"""Which models load and compute what transformers computes, and what is said about those that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from cores.config import ConfigError, EngineConfig
from cores.loader import cgroup_free_bytes, check_supported, load_model, resolve_device, resolve_dtype, resolve_max_model_len
from cores.runner.model_runner import TorchModelRunner
from cores.runner.testing import add_random_weights, make_tiny_llama
from cores.testing import make_request, make_tiny_model_dir

SMALL: dict[str, Any] = {
    "vocab_size": 400,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def config_of(model_type: str, **settings: Any) -> Any:
    config = AutoConfig.for_model(model_type, **settings)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config


def save(path: Path, config: Any) -> Path:
    config.save_pretrained(path)
    return add_random_weights(path)


def engine_config(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", num_kv_blocks=64, **settings)


# --- families of models -------------------------------------------------------------------------------------------------

GPT2 = {"vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2}

DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config_of("qwen2", **SMALL, sliding_window=64), id="qwen2: biases, a window written down but off"),
        pytest.param(config_of("qwen3", **SMALL, head_dim=32), id="qwen3: head size of its own, normalised heads"),
        pytest.param(config_of("gemma", **SMALL, head_dim=16), id="gemma: scaled embeddings"),
        pytest.param(config_of("granite", **SMALL, logits_scaling=4.0), id="granite: scaled attention and logits"),
        pytest.param(config_of("mixtral", **SMALL, num_local_experts=4), id="mixtral: experts"),
        pytest.param(config_of("gpt2", **GPT2), id="gpt2: learned positions, no grouped heads"),
    ],
)
def test_models_of_many_families_compute_what_transformers_computes(
    make_engine: Callable[..., Any], config: Any, tmp_path: Path
) -> None:
    path = save(tmp_path, config)
    prompts = [[3 + (n * 7919 + i * i + 13 * i) % 390 for i in range(n)] for n in (1, 16, 33, 90)]
    requests = [make_request(handle, prompt, max_tokens=8) for handle, prompt in enumerate(prompts)]
    tokens = make_engine(path, max_num_batched_tokens=40).run(requests)

    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    for handle, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tokens[handle] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (config_of("t5"), "encoder-decoder"),
        (config_of("bert", architectures=["BertForSequenceClassification"]), "not a causal language model"),
        (config_of("mistral", sliding_window=256), "a sliding window shorter than --max-model-len"),
        (config_of("gemma2"), "soft-capping"),
        (config_of("mamba"), "layers other than softmax attention"),
        (config_of("qwen3_next"), "layers other than softmax attention"),
        (config_of("llama4_text"), "layers other than softmax attention"),
        (config_of("deepseek_v2"), "latent attention"),
        (config_of("falcon", alibi=True), "ALiBi"),
        (config_of("llama", rope_scaling=DYNAMIC_ROPE, max_position_embeddings=256), "dynamic or long RoPE"),
    ],
)
def test_a_model_that_needs_more_than_we_compute_is_refused_by_name(config: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{config.model_type} has or is .*{what}"):
        check_supported(config, max_model_len=512)


def test_a_window_or_a_dynamic_rope_that_no_sequence_outgrows_is_served() -> None:
    check_supported(config_of("mistral", sliding_window=256), max_model_len=256)
    check_supported(config_of("llama", rope_scaling=DYNAMIC_ROPE, max_position_embeddings=512), max_model_len=512)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (config_of("gpt_oss", **SMALL, head_dim=16, num_local_experts=4, sliding_window=512), "attention sinks"),
        (config_of("nemotron", **SMALL), "trial step failed"),  # does not hand our metadata through
        (config_of("stablelm", **SMALL), "does not let its attention be replaced"),
    ],
)
def test_what_the_configuration_does_not_show_the_trial_step_finds(config: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        TorchModelRunner(engine_config(save(tmp_path, config)), num_threads=1).load()


# --- directories and settings --------------------------------------------------------------------------------------------


def test_a_directory_without_config_or_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(engine_config(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="has no weights"):
        load_model(engine_config(make_tiny_model_dir(tmp_path)))


@pytest.mark.parametrize("content", ["{", '{"model_type": "nonsense"}', "{}"])
def test_a_config_that_cannot_be_used_is_named(tmp_path: Path, content: str) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(engine_config(tmp_path))


def test_broken_weights_are_named(tmp_path: Path) -> None:
    make_tiny_model_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(engine_config(tmp_path))


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"lacks .*layers\.2"):
        load_model(engine_config(tmp_path))


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(tmp_path: Path) -> None:
    make_tiny_model_dir(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # a hole: takes no room on the disk
    with pytest.raises(ConfigError, match=r"the weights need 2097152 MiB as torch\.bfloat16, but only \d+ MiB are free on cpu"):
        load_model(engine_config(tmp_path, dtype="bfloat16"))


def test_eos_comes_from_the_generation_config_then_from_the_config(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    assert load_model(engine_config(tmp_path)).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(engine_config(tmp_path)).eos_token_ids == (2,)


def test_dtype_auto_is_the_models_own() -> None:
    config = config_of("llama", dtype="bfloat16")
    assert resolve_dtype("auto", config) is torch.bfloat16
    assert resolve_dtype("float32", config) is torch.float32
    assert resolve_dtype("auto", config_of("llama")) is torch.float32


def test_max_model_len_is_the_models_own_unless_lowered() -> None:
    config = config_of("llama", max_position_embeddings=2048)
    assert resolve_max_model_len(None, config) == 2048
    assert resolve_max_model_len(100, config) == 100
    with pytest.raises(ConfigError, match="at most the model's own 2048, got 4096"):
        resolve_max_model_len(4096, config)
    with pytest.raises(ConfigError, match="--max-model-len is needed"):
        resolve_max_model_len(None, config_of("bloom"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


def test_free_memory_respects_a_containers_limit(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_free_bytes(tmp_path) == 450

"""A tiny Llama with random weights and LoRA adapters for it, to test the torch engine with. Needs torch, unlike
`cores.testing`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cores.testing import make_tiny_model_dir


def make_tiny_llama(path: Path, seed: int = 0, **config_overrides: Any) -> Path:
    """`make_tiny_model_dir` with float32 weights. Equal arguments give equal weights."""
    make_tiny_model_dir(path, **config_overrides)
    return add_random_weights(path, seed)


def add_random_weights(path: Path, seed: int = 0, auto_class: Any = AutoModelForCausalLM) -> Path:
    """Weights for whatever model the directory's config.json describes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        for parameter in model.parameters():
            # Far wider than a real initialisation, so that the next token depends on the whole context, and greedy output
            # does not fall into a loop of one token.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5)
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_random_lora(
    path: Path, model: Path, seed: int, *, modules: Iterable[str] = ALL_LINEAR, rank: int = 8, **config: Any
) -> Path:
    """An adapter directory as PEFT saves it, for all layers of `model` whose names end in one of `modules`.

    `config` goes into adapter_config.json; a `rank_pattern` there gives some layers another rank. Equal arguments give equal
    bytes.
    """
    path.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "bias": "none",
    } | config
    (path / "adapter_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        ending = layer.rpartition(".")[2]
        if ending in settings["target_modules"]:
            own_rank = settings.get("rank_pattern", {}).get(ending, rank)
            for half, shape in (("A", (own_rank, weight.shape[1])), ("B", (weight.shape[0], own_rank))):
                key = f"base_model.model.{layer}.lora_{half}.weight"
                weights[key] = torch.randn(shape, generator=generator) * 0.2
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path

"""A tiny Llama with random weights for tests of the torch engine. Needs torch, unlike `cores.testing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cores.testing import make_tiny_model_dir


def make_tiny_llama(path: Path, seed: int = 0, **config_overrides: Any) -> Path:
    """`make_tiny_model_dir` with float32 weights. Equal arguments give equal weights."""
    make_tiny_model_dir(path, **config_overrides)
    return add_random_weights(path, seed)


def add_random_weights(path: Path, seed: int = 0) -> Path:
    """Weights for whatever model the directory's config.json describes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        for parameter in model.parameters():
            # Far wider than a real initialisation, so that the next token depends on the whole context, and greedy output
            # does not fall into a loop of one token.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5)
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path

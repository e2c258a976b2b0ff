"""The lean way and the model's own are one computation: every logit is equal, to the last bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cores.runner.testing import make_tiny_llama
from cores.testing import make_request
from tests.cores.runner.torch_engine import Engine

PROMPT_LENGTHS = (3, 40, 17, 64, 1)
MODELS = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def run(model: Path, dtype: str, *, is_lean: bool) -> list[torch.Tensor]:
    """The logits of every step of a batch of prompts and their decodes."""
    engine = Engine(model, dtype=dtype)
    parts = engine.runner._parts
    assert parts is not None
    assert parts.lean is not None
    if not is_lean:
        engine.runner._parts = dataclasses.replace(parts, lean=None)
    seen: list[torch.Tensor] = []
    sample = parts.sampler.sample

    def recording(logits: torch.Tensor, *args: object) -> object:
        seen.append(logits.clone())
        return sample(logits, *args)  # type: ignore[arg-type]

    parts.sampler.sample = recording  # type: ignore[method-assign, assignment]
    engine.run([make_request(i, n, temperature=0.0, max_tokens=8, ignore_eos=True) for i, n in enumerate(PROMPT_LENGTHS)])
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_logit_is_that_of_the_models_own_code(name: str, dtype: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / name, **MODELS[name])
    lean, own = run(model, dtype, is_lean=True), run(model, dtype, is_lean=False)
    assert len(lean) == len(own) >= 8
    for a, b in zip(lean, own, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}])
def test_models_of_other_kinds_compute_by_themselves(settings: dict[str, object], tmp_path: Path) -> None:
    engine = Engine(make_tiny_llama(tmp_path / "other", **settings))
    assert engine.runner._parts is not None
    assert engine.runner._parts.lean is None

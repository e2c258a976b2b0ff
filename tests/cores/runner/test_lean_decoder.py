"""The lean way and the model's own are one computation: in float32 every logit is equal to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cores.runner import model_runner
from cores.runner.lean_decoder import LeanDecoder
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


def run(model: Path, dtype: str, **sampling: Any) -> list[torch.Tensor]:
    """The logits of every step of a batch of prompts and their decodes."""
    engine = Engine(model, dtype=dtype)
    parts = engine.runner._parts
    assert parts is not None
    seen: list[torch.Tensor] = []
    sample = parts.sampler.sample

    def recording(logits: torch.Tensor, *args: object) -> object:
        seen.append(logits.clone())
        return sample(logits, *args)  # type: ignore[arg-type]

    parts.sampler.sample = recording  # type: ignore[method-assign, assignment]
    requests = [
        make_request(i, n, temperature=0.0, max_tokens=8, ignore_eos=True, **sampling) for i, n in enumerate(PROMPT_LENGTHS)
    ]
    engine.run(requests)
    return seen


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """Models compute by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeanDecoder, "can_compute", lambda model: False)
        yield


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_every_logit_is_that_of_the_models_own_code(name: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / name, **MODELS[name])
    lean = run(model, "float32")
    with own_code():
        own = run(model, "float32")
    assert len(lean) == len(own) >= 8
    for a, b in zip(lean, own, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "no compiler"])
@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_logits_are_as_near_to_the_exact_ones_as_those_of_the_models_own_code(
    name: str, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_llama(tmp_path / name, head_dim=32, **MODELS[name])  # the least that the kernels take
    same_tokens = {"allowed_token_ids": [7]}  # whatever the logits say, so that each step has the same input
    if not has_kernels:
        monkeypatch.setattr(model_runner, "load_cpu_kernels", lambda: None)
    exact, lean = run(model, "float32", **same_tokens), run(model, "bfloat16", **same_tokens)
    monkeypatch.setattr(model_runner, "load_cpu_kernels", lambda: None)
    with own_code():
        own = run(model, "bfloat16", **same_tokens)
    assert len(exact) == len(lean) == len(own) >= 8
    assert distance(lean, exact) <= 1.1 * distance(own, exact)


def distance(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Root mean square."""
    return float((torch.cat(logits).float() - torch.cat(exact)).square().mean().sqrt())


@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}])
def test_models_of_other_kinds_compute_by_themselves(settings: dict[str, object], tmp_path: Path) -> None:
    engine = Engine(make_tiny_llama(tmp_path / "other", **settings))
    assert engine.runner._parts is not None
    assert engine.runner._parts.lean is None

"""`scripts/gpu_check` finds what it looks for. A GPU is not needed for that: it runs the same on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cores.runner.testing import make_tiny_llama
from scripts import gpu_check


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("gpu-check") / "model")


def test_the_bound_counts_weights_once_a_step_and_every_context() -> None:
    assert gpu_check.bound_tokens_per_s(1000.0, 100, 2, batch_size=1, num_context_tokens=0) == 10
    assert gpu_check.bound_tokens_per_s(1000.0, 100, 2, batch_size=10, num_context_tokens=5) == 10 * 1000 / 200


def test_our_engine_equals_transformers(tiny_llama: Path) -> None:
    comparison = gpu_check.check_equality(str(tiny_llama), "cpu", "float32", max_near_tie=0.0)
    assert comparison == gpu_check.Comparison(len(gpu_check.PROMPT_LENGTHS), 0, [])


def test_a_wrong_token_is_seen_with_what_the_reference_thinks_of_it(tiny_llama: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    prompt = [5, 6, 7]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1]
    best, other = logits.topk(2).indices.tolist()
    gap = gpu_check._gap_where_they_part(reference, prompt, [other, best])
    assert gap == pytest.approx(float(logits[best] - logits[other]), rel=1e-4)
    assert gpu_check._gap_where_they_part(reference, prompt, [best]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "nothing was checked" in capsys.readouterr().err

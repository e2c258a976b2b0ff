from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cores.runner.testing import make_tiny_llama
from tests.cores.runner.torch_engine import Engine

NUM_REFERENCE_TOKENS = 24


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """More would spin against each other and against the tests of other processes: seconds for what takes milliseconds."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def generate(tiny_llama: Path) -> Callable[[Sequence[int]], list[int]]:
    """transformers' own greedy continuation of one prompt, up to its EOS."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")

    def continuation(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_REFERENCE_TOKENS, do_sample=False, pad_token_id=2
        )
        return out[0, len(prompt) :].tolist()

    return continuation


@pytest.fixture
def make_engine(tiny_llama: Path) -> Callable[..., Engine]:
    def make(model: Path = tiny_llama, **settings: Any) -> Engine:
        return Engine(model, **settings)

    return make

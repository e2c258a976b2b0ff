from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreRequest, RankId
from cores.runner.interface import ModelInfo
from cores.runner.model_runner import TorchModelRunner
from cores.runner.testing import make_tiny_llama

NUM_REFERENCE_TOKENS = 24


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


class Engine:
    """An engine core over the torch runner, driven by hand."""

    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(**{"model": str(model), "device": "cpu", "dtype": "float32", "num_kv_blocks": 256} | settings)
        runner = TorchModelRunner(config, num_threads=1)
        self.info: ModelInfo = runner.load()
        self.core = EngineCore(RankId(0, 1), config, self.info, runner, clock=lambda: 0.0)

    def run(self, requests: Sequence[EngineCoreRequest]) -> dict[int, list[int]]:
        """All of them at once, to their end. Token ids by handle; an error of any request is raised."""
        for request in requests:
            self.core.add_request(0, request)
        tokens: dict[int, list[int]] = {request.handle: [] for request in requests}
        while self.core.has_work:
            for outputs in self.core.step().values():
                errors = [finished.error for finished in outputs.finished.values() if finished.error]
                assert not errors, errors
                for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
                    tokens[handle].append(token_id)
            self.core.check_invariants()
        return tokens


@pytest.fixture
def make_engine(tiny_llama: Path) -> Callable[..., Engine]:
    def make(model: Path = tiny_llama, **settings: Any) -> Engine:
        return Engine(model, **settings)

    return make

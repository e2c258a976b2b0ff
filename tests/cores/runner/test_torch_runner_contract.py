"""The torch runner under the contract of all runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cores.config import EngineConfig
from cores.runner.interface import ModelRunner
from cores.runner.model_runner import TorchModelRunner
from tests.cores.runner_contract import RunnerContract


class TestTorchModelRunner(RunnerContract):
    @pytest.fixture
    def model(self, tiny_llama: Path) -> Path:
        return tiny_llama

    @pytest.fixture
    def make_runner(self) -> Callable[[EngineConfig], ModelRunner]:
        # float32: in bfloat16 the order of sums, which a batch changes, decides between tokens that are nearly equal.
        return lambda config: TorchModelRunner(replace(config, device="cpu", dtype="float32"), num_threads=1)

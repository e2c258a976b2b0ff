"""Which torch runner serves a model."""

from __future__ import annotations

from cores.config import EngineConfig
from cores.runner.encoder import EncoderModelRunner
from cores.runner.interface import ModelRunner
from cores.runner.model_runner import TorchModelRunner
from cores.runner.pooling_kind import read_pooling_kind


def make_torch_runner(config: EngineConfig, num_threads: int | None = None) -> ModelRunner:
    """Raises `ConfigError` for a model that none serves."""
    kind = read_pooling_kind(config.model, config.runner)
    if kind is not None and kind.is_encoder:
        return EncoderModelRunner(config, kind, num_threads)
    return TorchModelRunner(config, num_threads, kind)

"""An engine core over the torch runner, for tests that drive it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreRequest, Finished, RankId
from cores.runner.interface import ModelInfo
from cores.runner.model_runner import TorchModelRunner


class Engine:
    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(**{"model": str(model), "device": "cpu", "dtype": "float32", "num_kv_blocks": 256} | settings)
        self.runner = TorchModelRunner(config, num_threads=1)
        self.info: ModelInfo = self.runner.load()
        self.core = EngineCore(RankId(0, 1), config, self.info, self.runner, clock=lambda: 0.0)
        self.ends: dict[int, Finished] = {}  # by handle

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
                self.ends |= {outputs.handles[row]: finished for row, finished in outputs.finished.items()}
            self.core.check_invariants()
        return tokens

    @property
    def lora_ids(self) -> list[str]:
        """Of the adapters that the runner has in memory."""
        return list(self.runner._loras.adapters)

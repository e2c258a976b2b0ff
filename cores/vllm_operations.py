"""What operators do to a hosted vLLM between two steps, and what of it vLLM cannot do. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from cores.lora import LoraError
from cores.utilities import OperationRefusedError


class VllmOperations:
    """`core` is vLLM's `EngineCore`. Any other public name is a method of vLLM's workers (`collective_rpc`)."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._lost_weights = False  # asleep at level 2

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._core.collective_rpc(name, args=args, kwargs=kwargs)

    def sleep(self, level: int) -> None:
        self._core.model_executor.sleep(level)
        self._lost_weights = level == 2

    def wake_up(self, tags: Collection[str]) -> None:
        if not tags:
            return
        self._core.model_executor.wake_up(sorted(tags))
        if self._lost_weights and "weights" in tags:
            self._core.collective_rpc("reload_weights")
            self._lost_weights = False

    def start_profile(self) -> None:
        self._core.profile(True)

    def stop_profile(self, stem: Path) -> Path:
        """vLLM chooses the names of its files: the directory."""
        self._core.profile(False)
        return stem.parent

    def shutdown(self) -> None:
        """The process ends, and frees all of it: vLLM's own clean-up takes seconds."""

    # --- what it cannot do --------------------------------------------------------------------------------------------

    def prepare_weights(self, directory: str) -> None:
        raise OperationRefusedError("--engine vllm takes no new weights while it runs: restart its ranks with another MODEL")

    def commit_weights(self) -> None:
        raise AssertionError("no weights are ever prepared")

    def discard_weights(self) -> None:
        """None are kept."""

    def load_lora(self, path: str) -> str:
        raise LoraError("--engine vllm serves no LoRA adapters")

    def drop_lora(self, lora_id: str) -> None:
        """Holds none."""

    def pin_loras(self, lora_ids: frozenset[str]) -> None:
        """Holds none."""

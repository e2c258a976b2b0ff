"""What front ends do to the LoRA adapters of an engine, between two steps. Knows no sockets and no tensors."""

from __future__ import annotations

from typing import Any

from cores.config import ConfigError, parse_lora_modules
from cores.lora import LoraAdapters, LoraError, LoraHolder, LoraNotFoundError
from cores.step_engine import StepEngine
from cores.utilities import utility


class LoraOperations:
    """`max_loras` = 0: the engine serves none. All methods are called from the thread that steps the engine."""

    def __init__(self, holder: LoraHolder, engine: StepEngine, max_loras: int) -> None:
        self._adapters = LoraAdapters(holder, max_loras)
        self._engine = engine

    def load_modules(self, words: tuple[str, ...]) -> None:
        """The adapters that are there from the start, as `--lora-modules` names them. Raises `ConfigError`."""
        for name, path in parse_lora_modules(words).items():
            try:
                self.add_lora(name, path)
            except LoraError as error:
                raise ConfigError(f"--lora-modules {name}={path}: {error}") from error

    def resolve(self, name: str, lora_id: str | None) -> str:
        """The id of a request's adapter. Raises `LoraError`."""
        return self._adapters.resolve(name, lora_id)

    @utility
    def add_lora(self, name: str, path: str, lora_id: str | None = None) -> dict[str, Any]:
        """Serves an adapter under a name, in place of another one of that name: see `LoraAdapters.add`."""
        lora = self._adapters.add(name, path, lora_id)
        self._on_change()
        return lora.to_plain()

    @utility
    def remove_lora(self, name: str) -> bool:
        """New requests for it are refused, those that have come go on. False when there is none of that name."""
        was_there = self._adapters.remove(name)
        self._on_change()
        return was_there

    @utility
    def list_loras(self) -> list[dict[str, Any]]:
        return [lora.to_plain() for lora in self._adapters.loras()]

    @utility
    def pin_lora(self, name: str) -> None:
        """Keeps it resident from its next use on."""
        self._adapters.pin(name)
        self._on_change()

    @utility
    def stage_lora(self, path: str) -> dict[str, Any]:
        """First half of an `add_lora` on several ranks: loads the adapter and returns its id. That it cannot be served is an
        answer too, with the reason. `sync_loras` takes it back."""
        try:
            return {"id": self._adapters.stage(path), "error": None, "is_missing": False}
        except LoraError as error:
            return {"id": None, "error": str(error), "is_missing": isinstance(error, LoraNotFoundError)}

    @utility
    def sync_loras(self, wanted: list[Any]) -> dict[str, str]:
        """Makes these, as [name, path, id, is pinned], all adapters that there are. Why some are missing that cannot be had."""
        missing = self._adapters.sync(wanted)
        self._on_change()
        return missing

    def _on_change(self) -> None:
        self._engine.loras.pinned = self._adapters.pinned
        self.drop_unused()

    def drop_unused(self) -> None:
        """After every step: what lost its name while requests used it."""
        if self._adapters.unnamed:
            self._adapters.drop_unused(self._engine.lora_ids())

    def check_invariants(self) -> None:
        self._adapters.check_invariants()

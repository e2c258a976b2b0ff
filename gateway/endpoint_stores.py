"""What the front ends of one endpoint share: their usage, its adapters, what operators did. Knows nothing of what it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gateway.admission import OneFrontEnd, SharedSlots, UsageSlots
from gateway.group_settings import GroupSettings, GroupStore
from gateway.lora_store import LoraStore, OwnLoraStore, SharedLoraStore
from gateway.shared_value import OwnValue, SharedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStores:
    """Of an `AsyncLLM` that is alone, unless others are given."""

    slots: UsageSlots = field(default_factory=OneFrontEnd)
    loras: LoraStore = field(default_factory=OwnLoraStore)
    group: GroupStore = field(default_factory=OwnValue)

    @classmethod
    def in_directory(cls, directory: Path, index: int, num_front_ends: int) -> EndpointStores:
        """Of the front end of that index, whose next life finds them again."""
        return cls(
            slots=OneFrontEnd() if num_front_ends == 1 else SharedSlots(directory / "admission", index, num_front_ends),
            loras=SharedLoraStore(directory / "loras.json"),
            group=SharedValue(directory / "group.json", GroupSettings),
        )

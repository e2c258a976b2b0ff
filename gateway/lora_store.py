"""Where the front ends of one endpoint keep which adapters there are. Knows no ranks.

Whoever is asked for a model looks there first. The lock is held for a whole change, over all ranks, so changes and the
restoring of a restarted rank come one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.shared_value import OwnValue, SharedValue, ValueStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """An adapter that is served as a model of its name."""

    name: str
    path: str
    id: str  # a hash of its files
    is_pinned: bool = False


Adapters = Mapping[str, LoraAdapter]  # by name
LoraStore = ValueStore[Adapters]
OwnLoraStore = OwnValue[Adapters]


class SharedLoraStore(SharedValue[Adapters]):
    def __init__(self, path: Path) -> None:
        super().__init__(path, dict[str, LoraAdapter])

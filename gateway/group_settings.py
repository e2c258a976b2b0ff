"""What operators did to all ranks of an endpoint, as one value. A rank that starts again is given it before it serves.

It is written before the ranks are told: whoever starts to serve in between has read it, or is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.shared_value import ValueStore

MEMORY_TAGS = ("weights", "kv_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    weights_directory: str | None = None  # None: the model's own
    weight_version: int = 0
    is_paused: bool = False
    sleep_level: int = 1  # as far as something sleeps
    asleep: tuple[str, ...] = ()  # of MEMORY_TAGS

    def paused(self) -> GroupSettings:
        return dataclasses.replace(self, is_paused=True)

    def resumed(self) -> GroupSettings:
        return dataclasses.replace(self, is_paused=False)

    def slept(self, level: int) -> GroupSettings:
        """Dropped weights do not come back by a lighter sleep."""
        level = max(level, self.sleep_level) if "weights" in self.asleep else level
        return dataclasses.replace(self, sleep_level=level, asleep=MEMORY_TAGS)

    def woken(self, tags: Sequence[str] | None) -> GroupSettings:
        return dataclasses.replace(self, asleep=tuple(tag for tag in self.asleep if tags is not None and tag not in tags))

    def with_weights(self, directory: str, version: int) -> GroupSettings:
        return dataclasses.replace(self, weights_directory=directory, weight_version=version)


GroupStore = ValueStore[GroupSettings]

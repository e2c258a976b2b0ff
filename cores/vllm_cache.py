"""What is in vLLM's prefix cache, in hashes of ours: a balancer knows prefixes by these. Knows no requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cores.block_hash import ROOT, BlockHash, hash_block, landmark_stride
from cores.cache_watch import CacheChanges


class VllmCache:
    """Takes the place of the publisher to which vLLM's scheduler gives its cache events."""

    def __init__(self, block_size: int) -> None:
        self.changes: CacheChanges | None = None  # where to note them for a balancer; None: nowhere
        self._block_size = block_size
        self._stride = landmark_stride(block_size)
        self._blocks: dict[
            Any, tuple[BlockHash, int]
        ] = {}  # by vLLM's hash: ours, and which block of its sequence it is, from 1

    def cached_landmarks(self) -> Iterable[BlockHash]:
        return [block_hash for block_hash, index in self._blocks.values() if self._is_landmark(index)]

    def clear(self) -> None:
        self._blocks.clear()
        if self.changes is not None:
            self.changes.on_cleared()

    # --- as vLLM calls it ---------------------------------------------------------------------------------------------

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self._remove(event.block_hashes)
                case "AllBlocksCleared":
                    self.clear()

    def get_publisher_config(self) -> None:
        """Nobody else can subscribe."""

    def shutdown(self) -> None:
        """Holds nothing."""

    # ------------------------------------------------------------------------------------------------------------------

    def _is_landmark(self, index: int) -> bool:
        return index % self._stride == 0

    def _store(self, event: Any) -> None:
        """A run of blocks after `parent_block_hash`."""
        if event.block_size != self._block_size:  # of a part of a block, or of layers with another cache
            return
        if event.parent_block_hash is None:
            parent, index = _root(event.extra_keys), 0
        elif event.parent_block_hash in self._blocks:
            parent, index = self._blocks[event.parent_block_hash]
        else:  # it is gone already: nobody can find what follows it
            return
        for i, theirs in enumerate(event.block_hashes):
            parent = hash_block(parent, event.token_ids[i * self._block_size : (i + 1) * self._block_size])
            index += 1
            self._blocks[theirs] = (parent, index)
            if self.changes is not None and self._is_landmark(index):
                self.changes.on_stored(parent)

    def _remove(self, hashes: Iterable[Any]) -> None:
        for theirs in hashes:
            block_hash, index = self._blocks.pop(theirs, (ROOT, 0))
            if index and self.changes is not None and self._is_landmark(index):
                self.changes.on_evicted(block_hash)


def _root(extra_keys: list[tuple[Any, ...] | None] | None) -> BlockHash:
    """The salt of a sequence's first block is our root in hexadecimal (`vllm_mapping.cache_salt`)."""
    keys = (extra_keys[0] if extra_keys else None) or ()
    return bytes.fromhex(keys[-1]) if keys else ROOT

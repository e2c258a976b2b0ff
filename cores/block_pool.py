"""KV cache blocks: who holds each, and which of them still hold something worth keeping. Knows no requests and no tensors.

Rules
-----
* A block is held (`ref_count` > 0) or free, never both. Free blocks stand in one queue, taken from its front.
* A full, computed block may carry a hash. It keeps it while free, so that an equal prefix can revive it, and loses it when
  it is taken for something else. Blocks without a hash are taken first, then the least recently freed.
* One block per hash: an equal block computed beside it stays without one and is simply used up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from cores.block_hash import BlockHash
from cores.cache_watch import CacheChanges


class BlockPool:
    """Blocks 0 … `num_blocks` - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # read by others, written here
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[BlockHash, int] = {}
        self._is_landmark = bytearray(num_blocks)  # of the blocks that have a hash
        self.changes: CacheChanges | None = None  # where to note which landmarks can be found from now on and which no longer

    @property
    def num_free(self) -> int:
        return len(self._free)

    def cached_landmarks(self) -> list[BlockHash]:
        return [block_hash for block_hash, block_id in self._by_hash.items() if self._is_landmark[block_id]]

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that holds this content, held or free."""
        return self._by_hash.get(block_hash)

    def is_free(self, block_id: int) -> bool:
        return self.ref_counts[block_id] == 0

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more holder for each; a free block is revived with its content."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._free[block_id]
            self.ref_counts[block_id] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks for new content, held once each. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self.ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: list[int]) -> None:
        """One holder less for each block of a sequence, given in its order."""
        # The tail goes first into the queue: a prefix is worth more to others than what follows it.
        for block_id in reversed(block_ids):
            self.ref_counts[block_id] -= 1
            assert self.ref_counts[block_id] >= 0, f"block {block_id} released more often than held"
            if self.ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def set_hash(self, block_id: int, block_hash: BlockHash, is_landmark: bool = True) -> None:
        """The block is full and computed: from now on it can be found."""
        if self._hashes[block_id] is None and block_hash not in self._by_hash:
            self._hashes[block_id] = block_hash
            self._by_hash[block_hash] = block_id
            self._is_landmark[block_id] = is_landmark
            if is_landmark and self.changes is not None:
                self.changes.on_stored(block_hash)

    def forget_all(self) -> None:
        """No block can be found any more. Holders keep theirs."""
        for block_id in self._by_hash.values():
            self._hashes[block_id] = None
        self._by_hash.clear()
        if self.changes is not None:
            self.changes.on_cleared()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None
            if self.changes is not None and self._is_landmark[block_id]:
                self.changes.on_evicted(block_hash)

    def check_invariants(self) -> None:
        assert len(self.ref_counts) == len(self._hashes) == self.num_blocks
        assert set(self._free) == {i for i, count in enumerate(self.ref_counts) if count == 0}
        assert all(count >= 0 for count in self.ref_counts)
        assert self._by_hash == {h: i for i, h in enumerate(self._hashes) if h is not None}

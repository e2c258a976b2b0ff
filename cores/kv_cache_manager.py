"""Which KV blocks each request holds, and how much of a prompt is already computed in the prefix cache. Pure bookkeeping.

A request holds blocks for all its tokens from its admission on, so that a prompt once begun is never short of room; only
decoding asks for more. A block can be found from the moment on that a step is to complete it, also by others in that very step:
a runner writes the K and V of a whole batch before it reads any (`ModelRunner.execute`).
"""

from __future__ import annotations

from collections.abc import Iterable

from cores.block_hash import LANDMARK_TOKENS, BlockHash, hash_block, landmark_stride
from cores.block_pool import BlockPool
from cores.cache_watch import CacheChanges
from cores.request import Request


class KVCacheManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        landmark_tokens: int = LANDMARK_TOKENS,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._stride = landmark_stride(block_size, landmark_tokens)
        self._generation = 0  # of the cache: a reset starts the next, and what was computed before it never enters

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_blocks_used(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_blocks_free(self) -> int:
        return self._pool.num_free

    @property
    def num_tokens_capacity(self) -> int:
        return self._pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, num_spare: int = 0) -> bool:
        """Gives a request without blocks room for all its tokens; what the cache has counts as computed.

        False, and nothing changed, when fewer than `num_spare` free blocks would be left.
        """
        assert not request.block_ids, f"{request.request_id} is admitted twice"
        cached = self._find_cached_prefix(request)
        if self._num_taken_from_free(request, cached) + num_spare > self._pool.num_free:
            return False
        self._pool.hold(cached)
        request.block_ids = cached + self._pool.take(self.num_blocks_for(request.num_tokens) - len(cached))
        request.num_computed_tokens = len(cached) * self.block_size
        request.num_cached_blocks = len(cached)
        request.cache_generation = self._generation
        return True

    def num_cached_tokens(self, request: Request) -> int:
        """Of a waiting request: what `admit` would count as computed."""
        return len(self._find_cached_prefix(request)) * self.block_size

    def num_blocks_to_admit(self, request: Request) -> int:
        """How many free blocks `admit` would take."""
        return self._num_taken_from_free(request, self._find_cached_prefix(request))

    def _num_taken_from_free(self, request: Request, cached: list[int]) -> int:
        num_revived = sum(self._pool.is_free(block_id) for block_id in cached)
        return self.num_blocks_for(request.num_tokens) - len(cached) + num_revived

    def num_blocks_held_alone(self, request: Request) -> int:
        """How many blocks `free` would make free: others may hold some of them, too."""
        return sum(self._pool.ref_counts[block_id] == 1 for block_id in request.block_ids)

    def grow(self, request: Request) -> bool:
        """Makes the request's blocks cover its newest token. False when no block is free."""
        if request.num_tokens <= len(request.block_ids) * self.block_size:
            return True
        if self._pool.num_free == 0:
            return False
        request.block_ids += self._pool.take(1)
        return True

    def enter_cache(self, request: Request, num_tokens: int) -> None:
        """Lets others find the blocks that are full once the request's first `num_tokens` are computed."""
        num_full = num_tokens // self.block_size
        if num_full == request.num_cached_blocks:
            return
        if self.enable_prefix_caching and request.cache_generation == self._generation:
            self._extend_hashes(request, num_full)
            for i in range(request.num_cached_blocks, num_full):
                self._pool.set_hash(request.block_ids[i], request.block_hashes[i], (i + 1) % self._stride == 0)
        request.num_cached_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes the request's blocks back; those in the cache can still be found until they are needed."""
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_cached_blocks = 0

    def reset_prefix_cache(self) -> None:
        """Forgets everything cached. Running requests keep their blocks, which do not enter the new cache."""
        self._pool.forget_all()
        self._generation += 1

    def record_changes(self, changes: CacheChanges | None) -> None:
        """From now on notes there which landmarks can be found and which no longer; None: notes nothing."""
        self._pool.changes = changes

    def cached_landmarks(self) -> list[BlockHash]:
        return self._pool.cached_landmarks()

    def _find_cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute: its logits choose the next one."""
        found: list[int] = []
        if not self.enable_prefix_caching or request.needs_prompt_logprobs:
            return found
        for i in range((request.num_tokens - 1) // self.block_size):
            self._extend_hashes(request, i + 1)
            block_id = self._pool.find(request.block_hashes[i])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else request.root_hash
            hashes.append(hash_block(parent, request.token_ids[i * size : (i + 1) * size]))

    def check_invariants(self, holders: Iterable[Request]) -> None:
        """`holders` are all the requests that hold blocks."""
        self._pool.check_invariants()
        counts = [0] * self._pool.num_blocks
        for request in holders:
            assert len(set(request.block_ids)) == len(request.block_ids), f"{request.request_id} holds a block twice"
            assert request.num_computed_tokens <= len(request.block_ids) * self.block_size
            for block_id in request.block_ids:
                counts[block_id] += 1
        assert counts == self._pool.ref_counts, "blocks held by requests and reference counts differ"

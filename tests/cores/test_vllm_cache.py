"""vLLM's cache events as landmarks of ours."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cores.block_hash import LANDMARK_TOKENS, ROOT, prefix_keys, root_hash
from cores.cache_watch import CacheWatch
from cores.messages import CacheEvents, RankId
from cores.vllm_cache import VllmCache

BLOCK_SIZE = 16
STRIDE = LANDMARK_TOKENS // BLOCK_SIZE


@dataclass
class BlockStored:
    block_hashes: list[str]
    parent_block_hash: str | None
    token_ids: list[int]
    block_size: int = BLOCK_SIZE
    extra_keys: list[tuple[Any, ...] | None] | None = None


@dataclass
class BlockRemoved:
    block_hashes: list[str]


class AllBlocksCleared:
    pass


class Watched:
    """A cache, and a front end that watches it."""

    def __init__(self) -> None:
        self.cache = VllmCache(BLOCK_SIZE)
        self._watch = CacheWatch(RankId(0, 1), self._record, self.cache.cached_landmarks)

    def _record(self, changes: Any) -> None:
        self.cache.changes = changes

    def snapshot(self) -> set[int]:
        self._watch.watch(0)
        return set(self._watch.take_events()[0].stored)

    def publish(self, *events: object) -> CacheEvents | None:
        self.cache.publish(SimpleNamespace(events=list(events)))
        return self._watch.take_events().get(0)


def stored(tokens: list[int], first: int = 0, parent: str | None = None, **more: Any) -> BlockStored:
    """All full blocks of the tokens from that block on, named after their number."""
    names = [f"block-{i}" for i in range(first, len(tokens) // BLOCK_SIZE)]
    return BlockStored(names, parent, tokens[first * BLOCK_SIZE : len(tokens) // BLOCK_SIZE * BLOCK_SIZE], **more)


TOKENS = list(range(3 * LANDMARK_TOKENS))
KEYS = list(prefix_keys([*TOKENS, 0], BLOCK_SIZE))


def test_a_prompt_is_known_by_the_keys_that_a_front_end_makes_of_it() -> None:
    watched = Watched()
    assert watched.snapshot() == set()
    first = watched.publish(stored(TOKENS[: LANDMARK_TOKENS + BLOCK_SIZE]))
    assert first is not None
    assert list(first.stored) == KEYS[:1]
    rest = watched.publish(stored(TOKENS, STRIDE + 1, parent=f"block-{STRIDE}"))
    assert rest is not None
    assert list(rest.stored) == KEYS[1:]
    assert watched.snapshot() == set(KEYS)


def test_what_was_cached_before_anybody_watched_is_in_the_snapshot() -> None:
    watched = Watched()
    assert watched.publish(stored(TOKENS)) is None
    assert watched.snapshot() == set(KEYS)


def test_what_leaves_is_told_and_what_cannot_be_found_is_not() -> None:
    watched = Watched()
    watched.snapshot()
    watched.publish(stored(TOKENS))
    gone = watched.publish(BlockRemoved([f"block-{STRIDE - 1}", "block-0", "unknown"]))
    assert gone is not None
    assert list(gone.evicted) == KEYS[:1]
    assert watched.publish(stored(TOKENS, 1, parent="block-0")) is None, "its parent is gone"
    assert watched.publish(stored(TOKENS, block_size=BLOCK_SIZE // 2)) is None, "a part of a block"
    cleared = watched.publish(AllBlocksCleared())
    assert cleared is not None
    assert cleared.is_snapshot
    assert watched.snapshot() == set()


def test_a_salt_makes_another_prefix() -> None:
    watched = Watched()
    root = root_hash(None, "salt")
    assert root != ROOT
    watched.publish(stored(TOKENS, extra_keys=[(root.hex(),), None]))
    assert watched.snapshot() == set(prefix_keys([*TOKENS, 0], BLOCK_SIZE, root))
    assert watched.snapshot().isdisjoint(KEYS)

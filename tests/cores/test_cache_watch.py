"""What a front end is told of a prefix cache: a snapshot first, then every change, in order and without gaps."""

from __future__ import annotations

from collections.abc import Iterable

from cores.block_hash import hash_block, to_keys
from cores.block_pool import BlockPool
from cores.cache_watch import CacheChanges, CacheWatch
from cores.messages import CacheEvents, RankId

RANK = RankId(0, 1)
A, B, C, D = (hash_block(b"\0" * 16, [n]) for n in range(4))


class Cache:
    def __init__(self, num_blocks: int = 3) -> None:
        self.pool = BlockPool(num_blocks)
        self.watch = CacheWatch(RANK, self.record, self.pool.cached_landmarks)

    def record(self, changes: CacheChanges | None) -> None:
        self.pool.changes = changes

    def store(self, *hashes: bytes) -> None:
        """Each in a block that is then free, so that later ones may take it."""
        for block_hash in hashes:
            (block_id,) = self.pool.take(1)
            self.pool.set_hash(block_id, block_hash)
            self.pool.release([block_id])

    def told(self, client: int = 0) -> tuple[int, bool, set[int], set[int]] | None:
        events = self.watch.take_events().get(client)
        return None if events is None else plain(events)


def plain(events: CacheEvents) -> tuple[int, bool, set[int], set[int]]:
    return events.seq, events.is_snapshot, set(events.stored), set(events.evicted)


def keys(*hashes: bytes) -> set[int]:
    return set(to_keys(hashes))


def test_nothing_is_recorded_while_nobody_watches() -> None:
    cache = Cache()
    cache.store(A)
    assert cache.pool.changes is None
    assert cache.watch.take_events() == {}


def test_snapshot_comes_first_and_changes_follow_without_gaps() -> None:
    cache = Cache()
    cache.store(A)
    cache.watch.watch(0)
    assert cache.told() == (0, True, keys(A), set())
    assert cache.told() is None
    cache.store(B, C)
    assert cache.told() == (1, False, keys(B, C), set())
    cache.store(D)  # takes the place of A
    assert cache.told() == (2, False, keys(D), keys(A))


def test_block_that_came_and_left_in_between_has_left() -> None:
    cache = Cache(num_blocks=1)
    cache.watch.watch(0)
    cache.told()
    cache.store(A, B)
    assert cache.told() == (1, False, keys(B), keys(A))


def test_reset_is_a_snapshot_of_what_has_come_since() -> None:
    cache = Cache()
    cache.watch.watch(0)
    cache.store(A, B)
    cache.told()
    cache.pool.forget_all()
    cache.store(C)
    assert cache.told() == (1, True, keys(C), set())


def test_second_watcher_gets_a_snapshot_of_its_own() -> None:
    cache = Cache()
    cache.watch.watch(0)
    cache.store(A)
    cache.told()
    cache.store(B)
    cache.watch.watch(1)
    events = cache.watch.take_events()
    assert plain(events[0]) == (1, False, keys(B), set())
    assert plain(events[1]) == (0, True, keys(A, B), set())


def test_watching_anew_begins_anew_and_the_last_to_leave_ends_the_record() -> None:
    cache = Cache()
    cache.watch.watch(0)
    cache.store(A)
    cache.told()
    cache.watch.watch(0)
    assert cache.told() == (0, True, keys(A), set())
    cache.watch.forget(0)
    assert cache.pool.changes is None
    cache.watch.forget(0)


def test_only_landmarks_are_told() -> None:
    cache = Cache()
    cache.watch.watch(0)
    for block_hash, is_landmark in ((A, True), (B, False)):
        (block_id,) = cache.pool.take(1)
        cache.pool.set_hash(block_id, block_hash, is_landmark)
        cache.pool.release([block_id])
    assert cache.told() == (0, True, keys(A), set())
    cache.store(C, D)
    cache.told()
    cache.store(A)  # takes the place of B
    assert cache.told() == (2, False, keys(A), set())


def test_keys_are_the_first_eight_bytes() -> None:
    def expected(hashes: Iterable[bytes]) -> list[int]:
        return [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]

    assert list(to_keys([A, B])) == expected([A, B])

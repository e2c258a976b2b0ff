"""Who wants to know what comes into the prefix cache and what leaves it, and what they are to be told. Knows no sockets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from cores.block_hash import BlockHash, to_keys
from cores.messages import CacheEvents, RankId


class CacheChanges:
    """What happened to a cache's landmarks since it was last asked: to each the last thing, and since it was last cleared."""

    def __init__(self) -> None:
        self._is_cached: dict[BlockHash, bool] = {}
        self._was_cleared = False

    def on_stored(self, block_hash: BlockHash) -> None:
        self._is_cached[block_hash] = True

    def on_evicted(self, block_hash: BlockHash) -> None:
        self._is_cached[block_hash] = False

    def on_cleared(self) -> None:
        self._is_cached.clear()
        self._was_cleared = True

    def take(self) -> tuple[bool, array[int], array[int]] | None:
        """Whether it was cleared, the keys stored, the keys evicted. None: nothing happened."""
        if not self._is_cached and not self._was_cleared:
            return None
        stored = to_keys(block_hash for block_hash, is_cached in self._is_cached.items() if is_cached)
        evicted = to_keys(block_hash for block_hash, is_cached in self._is_cached.items() if not is_cached)
        taken = (self._was_cleared, stored, evicted)
        self._is_cached.clear()
        self._was_cleared = False
        return taken


class CacheWatch:
    """The front ends that watch the cache of one rank. While there are none, the cache keeps no record of its changes."""

    def __init__(
        self, rank_id: RankId, record_changes: Callable[[CacheChanges | None], None], cached: Callable[[], Iterable[BlockHash]]
    ) -> None:
        """`record_changes` says where the cache is to note its changes, `cached` which landmarks it has now."""
        self._rank_id = rank_id
        self._record_changes = record_changes
        self._cached = cached
        self._changes: CacheChanges | None = None
        self._next_seq: dict[int, int] = {}  # by front end; 0: it gets a snapshot

    def watch(self, client: int) -> None:
        """From the next `take_events` on. Once more: from a snapshot on again."""
        if self._changes is None:
            self._changes = CacheChanges()
            self._record_changes(self._changes)
        self._next_seq[client] = 0

    def forget(self, client: int) -> None:
        self._next_seq.pop(client, None)
        if not self._next_seq and self._changes is not None:
            self._changes = None
            self._record_changes(None)

    def take_events(self) -> dict[int, CacheEvents]:
        """What each front end is to be told now, by front end. To be asked after every step and operation."""
        if self._changes is None:
            return {}
        changes = self._changes.take()
        events: dict[int, CacheEvents] = {}
        for client, seq in self._next_seq.items():
            if seq == 0:
                events[client] = CacheEvents(self._rank_id, seq, True, to_keys(self._cached()), array("Q"))
            elif changes is not None:
                events[client] = CacheEvents(self._rank_id, seq, *changes)
        for client in events:
            self._next_seq[client] += 1
        return events

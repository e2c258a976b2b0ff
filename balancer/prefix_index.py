"""Which ranks have which prefixes in their caches, as they say themselves or as we expect. Pure: no tokens, no clock.

A prefix is known by its landmarks, one block in every 64 tokens (`cores.block_hash`). Here they are just called blocks.

Rules
-----
* *Stored* is what a rank's own cache events say. They are numbered; after a gap nothing is believed of that rank until its next
  snapshot, which the caller asks for.
* *Expected* is what requests that we have sent there will store. It ends with the rank's word that it has, or with the request:
  a request that ends without having stored its blocks takes them with it.
* An equal prefix is an equal chain of keys. Adapter and cache salt are in the root of the chain, so they need no care here.

Theory of operation
-------------------
One dictionary holds for every key the set of ranks that have the block, as the bits of an integer. The longest prefix of a
prompt on every rank is then found in one walk along its keys: the ranks still in the running are one number, and those that
drop out at a key had what was before it. A walk ends where no rank is left, for most prompts at once.

Of a block that is there already, or expected by an earlier request, nothing is booked. If that earlier one is aborted, or the
block is evicted, it looks missing until the rank has computed it for the later one: a few steps at worst, and a guess is off.

Memory is bounded by what there is: stored blocks by the ranks' caches (a rank that claims more is not believed), expected ones
by the prompts of the requests in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from cores.block_hash import BlockKey
from cores.messages import CacheEvents, RankId


@dataclass(slots=True)
class _RankBlocks:
    rank_id: RankId
    bit: int  # a power of two, its own while it is here
    max_blocks: int | None
    stored: set[BlockKey] = field(default_factory=set)
    next_seq: int | None = None  # of its events; None: waits for a snapshot


class PrefixIndex:
    """One per front end. With several, each hears the events of all ranks, whoever caused them, and expects only its own."""

    def __init__(self) -> None:
        self._ranks: dict[RankId, _RankBlocks] = {}
        self._by_bit: dict[int, _RankBlocks] = {}
        self._all_bits = 0
        self._holders: dict[BlockKey, int] = {}  # bits of the ranks that have it, stored or expected
        self._booked: dict[int, tuple[_RankBlocks, Sequence[BlockKey]]] = {}  # by request: the blocks that it is to store

    @property
    def num_blocks(self) -> int:
        """Different ones, over all ranks."""
        return len(self._holders)

    def stored_blocks(self) -> dict[RankId, set[BlockKey]]:
        """What each rank says that it has."""
        return {rank_id: set(rank.stored) for rank_id, rank in self._ranks.items()}

    @property
    def booked_handles(self) -> Set[int]:
        """Requests that are to store something."""
        return self._booked.keys()

    def add_rank(self, rank_id: RankId, max_blocks: int | None = None) -> None:
        """A life of a rank begins, with nothing in its cache that we know of, and never more than `max_blocks`."""
        assert rank_id not in self._ranks, f"{rank_id} is in the index already"
        bit = (self._all_bits + 1) & ~self._all_bits  # the lowest that is free
        self._ranks[rank_id] = self._by_bit[bit] = _RankBlocks(rank_id, bit, max_blocks)
        self._all_bits |= bit

    def remove_rank(self, rank_id: RankId) -> None:
        rank = self._ranks.pop(rank_id, None)
        if rank is None:
            return
        self._clear(rank, rank.stored)
        for handle, (booked_rank, keys) in list(self._booked.items()):
            if booked_rank is rank:
                self._clear(rank, keys)
                del self._booked[handle]
        del self._by_bit[rank.bit]
        self._all_bits &= ~rank.bit

    def longest_prefixes(self, keys: Sequence[BlockKey], tokens_per_key: int = 1) -> dict[RankId, int]:
        """How long a beginning of them each rank has, in tokens; ranks that have none of it are left out."""
        lengths: dict[RankId, int] = {}
        alive = last = self._all_bits
        length = 0
        for holders in map(self._holders.get, keys):
            if holders != last:  # mostly the same ranks have one block of a chat and the next
                if holders is None:
                    break
                if length:
                    self._note_length(lengths, alive & ~holders, length)
                last = holders
                alive &= holders
                if not alive:
                    break
            length += tokens_per_key
        if length:
            self._note_length(lengths, alive, length)
        return lengths

    def _note_length(self, lengths: dict[RankId, int], bits: int, length: int) -> None:
        while bits:
            bit = bits & -bits
            lengths[self._by_bit[bit].rank_id] = length
            bits ^= bit

    # --- what we expect -----------------------------------------------------------------------------------------------

    def book(self, handle: int, rank_id: RankId, keys: Sequence[BlockKey]) -> None:
        """The rank is about to get this request: those behind it with the same prefix may count on it."""
        rank = self._ranks.get(rank_id)
        if rank is None or not keys:
            return
        holders, bit = self._holders, rank.bit
        new: Sequence[BlockKey] = keys
        if holders.keys().isdisjoint(keys):  # nobody has any of it, as of most new prompts: no look at each key
            for key in keys:
                holders[key] = bit
        else:
            new = []
            for key in keys:
                bits = holders.get(key, 0)
                if not bits & bit:
                    holders[key] = bits | bit
                    new.append(key)
        if new:
            self._booked[handle] = (rank, new)

    def release(self, handle: int) -> None:
        """It has ended, one way or another; what the rank has stored of it stays. Unknown handles are no-ops."""
        booked = self._booked.pop(handle, None)
        if booked is not None:
            rank, keys = booked
            if not rank.stored.issuperset(keys):
                self._clear(rank, [key for key in keys if key not in rank.stored])

    # --- what ranks say -----------------------------------------------------------------------------------------------

    def on_events(self, events: CacheEvents) -> bool:
        """False: something was lost, and the rank must be asked for a snapshot. Events of an unknown life are no-ops."""
        rank = self._ranks.get(events.rank_id)
        if rank is None:
            return True
        if events.is_snapshot:
            self._forget_stored(rank)
        elif rank.next_seq is None or events.seq < rank.next_seq:
            return True  # before the snapshot that was asked for, or heard before
        elif events.seq > rank.next_seq:
            self._distrust(rank)
            return False
        rank.next_seq = events.seq + 1
        self._evict(rank, events.evicted)
        self._store(rank, events.stored)
        if rank.max_blocks is not None and len(rank.stored) > rank.max_blocks:
            self._distrust(rank)
            return False
        return True

    def _store(self, rank: _RankBlocks, keys: Iterable[BlockKey]) -> None:
        holders, bit = self._holders, rank.bit
        rank.stored.update(keys)
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def _evict(self, rank: _RankBlocks, keys: Iterable[BlockKey]) -> None:
        gone = rank.stored.intersection(keys)
        rank.stored -= gone
        self._clear(rank, gone)

    def _forget_stored(self, rank: _RankBlocks) -> None:
        self._clear(rank, rank.stored)
        rank.stored.clear()

    def _distrust(self, rank: _RankBlocks) -> None:
        self._forget_stored(rank)
        rank.next_seq = None

    def _clear(self, rank: _RankBlocks, keys: Iterable[BlockKey]) -> None:
        holders, others = self._holders, ~rank.bit
        for key in keys:
            bits = holders.get(key, 0) & others
            if bits:
                holders[key] = bits
            else:
                holders.pop(key, None)

    def check_invariants(self) -> None:
        stored: dict[BlockKey, int] = {}
        for rank in self._ranks.values():
            assert rank.max_blocks is None or len(rank.stored) <= rank.max_blocks
            for key in rank.stored:
                stored[key] = stored.get(key, 0) | rank.bit
        known = dict(stored)
        for rank, keys in self._booked.values():
            assert self._ranks[rank.rank_id] is rank
            for key in keys:
                known[key] = known.get(key, 0) | rank.bit
        assert all(bits & self._holders[key] == bits for key, bits in stored.items())  # all that is stored
        assert all(bits & known[key] == bits for key, bits in self._holders.items())  # nothing that nobody will store
        assert self._by_bit == {rank.bit: rank for rank in self._ranks.values()}
        assert self._all_bits == sum(self._by_bit)

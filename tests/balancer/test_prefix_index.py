from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import pytest

from balancer.prefix_index import PrefixIndex
from cores.messages import CacheEvents, RankId

ZERO, ONE, TWO = (RankId(rank, 1) for rank in range(3))


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    index = PrefixIndex()
    for rank_id in (ZERO, ONE, TWO):
        index.add_rank(rank_id, max_blocks=8)
        assert index.on_events(CacheEvents(rank_id, 0, True, array("Q"), array("Q")))
    yield index
    index.check_invariants()


def events(
    rank_id: RankId, seq: int, stored: Sequence[int] = (), evicted: Sequence[int] = (), snapshot: bool = False
) -> CacheEvents:
    return CacheEvents(rank_id, seq, snapshot, array("Q", stored), array("Q", evicted))


def test_longest_prefix_is_told_for_each_rank(index: PrefixIndex) -> None:
    index.on_events(events(ZERO, 1, [1, 2, 3]))
    index.on_events(events(ONE, 1, [1, 2, 3, 4, 9]))
    assert index.longest_prefixes([1, 2, 3, 4]) == {ZERO: 3, ONE: 4}
    assert index.longest_prefixes([1, 2]) == {ZERO: 2, ONE: 2}
    assert index.longest_prefixes([9, 8]) == {ONE: 1}
    assert index.longest_prefixes([5]) == index.longest_prefixes([]) == {}


def test_prefix_ends_where_a_block_was_evicted(index: PrefixIndex) -> None:
    index.on_events(events(ZERO, 1, [1, 2, 3]))
    index.on_events(events(ZERO, 2, evicted=[2]))
    assert index.longest_prefixes([1, 2, 3]) == {ZERO: 1}


def test_snapshot_replaces_what_was_said_before(index: PrefixIndex) -> None:
    """The rank's cache was reset: or it went to sleep, or got new weights."""
    index.on_events(events(ZERO, 1, [1, 2]))
    assert index.on_events(events(ZERO, 2, [7], snapshot=True))
    assert index.longest_prefixes([1, 2]) == {}
    assert index.longest_prefixes([7]) == {ZERO: 1}
    assert index.on_events(events(ZERO, 3, [1]))
    assert index.longest_prefixes([1]) == {ZERO: 1}


def test_events_heard_twice_change_nothing(index: PrefixIndex) -> None:
    index.on_events(events(ZERO, 1, [1]))
    index.on_events(events(ZERO, 2, evicted=[1]))
    assert index.on_events(events(ZERO, 1, [1]))
    assert index.longest_prefixes([1]) == {}


def test_after_a_gap_nothing_is_believed_until_the_next_snapshot(index: PrefixIndex) -> None:
    index.on_events(events(ZERO, 1, [1, 2]))
    assert not index.on_events(events(ZERO, 3, [3]))  # what left the cache in number 2 is not known
    assert index.longest_prefixes([1, 2, 3]) == {}
    assert index.on_events(events(ZERO, 4, [4]))  # sent before the snapshot that we have asked for
    assert index.longest_prefixes([4]) == {}
    assert index.on_events(events(ZERO, 0, [1], snapshot=True))
    assert index.longest_prefixes([1, 2]) == {ZERO: 1}


def test_rank_that_claims_more_blocks_than_it_has_is_not_believed(index: PrefixIndex) -> None:
    assert index.on_events(events(ZERO, 1, range(1, 9)))
    assert not index.on_events(events(ZERO, 2, [9]))
    assert index.num_blocks == 0


def test_restarted_rank_begins_with_an_empty_cache(index: PrefixIndex) -> None:
    index.on_events(events(ZERO, 1, [1]))
    index.book(5, ZERO, [1, 2])
    index.remove_rank(ZERO)
    assert index.longest_prefixes([1, 2]) == {}
    index.add_rank(RankId(0, 2), max_blocks=8)
    assert index.on_events(events(ZERO, 2, [1]))  # last words of the life before
    assert index.longest_prefixes([1, 2]) == {}
    index.release(5)


# --- what requests under way will store ---------------------------------------------------------------------------------


def test_equal_prompt_sees_what_the_first_one_is_about_to_store(index: PrefixIndex) -> None:
    index.book(1, ONE, [1, 2, 3])
    assert index.longest_prefixes([1, 2, 3, 4]) == {ONE: 3}


def test_request_that_ends_before_it_stored_anything_leaves_nothing(index: PrefixIndex) -> None:
    index.book(1, ONE, [1, 2])
    index.release(1)
    assert index.num_blocks == 0
    index.release(1)  # again, or never booked: no-op


def test_what_was_stored_outlives_its_request(index: PrefixIndex) -> None:
    index.book(1, ONE, [1, 2, 3])
    index.on_events(events(ONE, 1, [1, 2]))
    index.release(1)
    assert index.longest_prefixes([1, 2, 3]) == {ONE: 2}


def test_second_request_books_only_what_it_adds(index: PrefixIndex) -> None:
    index.book(1, ONE, [1, 2])
    index.book(2, ONE, [1, 2, 3])
    index.release(2)
    assert index.longest_prefixes([1, 2, 3]) == {ONE: 2}


def test_reset_of_a_cache_leaves_what_waiting_requests_will_store(index: PrefixIndex) -> None:
    index.book(1, ONE, [1, 2])
    index.on_events(events(ONE, 1, snapshot=True))
    assert index.longest_prefixes([1, 2]) == {ONE: 2}


def test_same_block_on_many_ranks_is_kept_once() -> None:
    index = PrefixIndex()
    ranks = [RankId(rank, 1) for rank in range(100)]
    for rank_id in ranks:
        index.add_rank(rank_id)
        index.on_events(events(rank_id, 0, [1, 2], snapshot=True))
    assert index.num_blocks == 2
    assert index.longest_prefixes([1, 2, 3]) == dict.fromkeys(ranks, 2)
    for rank_id in ranks:
        index.remove_rank(rank_id)
    assert index.num_blocks == 0
    index.check_invariants()

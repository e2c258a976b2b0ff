"""Who holds a block, and for how long its content can be found."""

from __future__ import annotations

import pytest

from cores.block_pool import BlockPool

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_blocks_are_numbered_from_zero_and_taken_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.take(1)
    pool.check_invariants()


def test_a_released_block_keeps_its_content_until_it_is_needed() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.take(1)
    pool.set_hash(block_id, A)
    pool.release([block_id])
    assert pool.find(A) == block_id
    assert block_id not in pool.take(2)  # the two without content go first
    assert pool.take(1) == [block_id]
    assert pool.find(A) is None
    pool.check_invariants()


def test_the_least_recently_released_goes_first_and_the_tail_of_a_sequence_before_its_head() -> None:
    pool = BlockPool(3)
    first = pool.take(2)
    (second,) = pool.take(1)
    for block_id, block_hash in zip([*first, second], [A, B, C], strict=True):
        pool.set_hash(block_id, block_hash)
    pool.release(first)
    pool.release([second])
    assert pool.take(3) == [first[1], first[0], second]


def test_a_revived_block_is_not_handed_out_and_stays_when_one_of_two_holders_leaves() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.set_hash(block_id, A)
    pool.release([block_id])
    pool.hold([block_id])
    pool.hold([block_id])
    pool.release([block_id])
    assert pool.num_free == 1
    assert pool.take(1) != [block_id]
    pool.check_invariants()


def test_of_two_equal_blocks_only_the_first_can_be_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.set_hash(first, A)
    pool.set_hash(second, A)
    assert pool.find(A) == first
    pool.release([second])
    assert pool.find(A) == first
    assert pool.take(1) == [second]
    assert pool.find(A) == first
    pool.check_invariants()


def test_forgetting_all_leaves_holders_alone() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.set_hash(block_id, A)
    pool.forget_all()
    assert (pool.find(A), pool.num_free) == (None, 1)
    pool.release([block_id])
    pool.check_invariants()


def test_releasing_more_often_than_holding_is_a_bug() -> None:
    pool = BlockPool(1)
    pool.release(pool.take(1))
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release([0])

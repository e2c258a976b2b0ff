"""Equal hashes mean equal prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cores.block_hash import ROOT, hash_block, hash_blocks, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_as_many_blocks_agree_as_the_prefixes_do(first: list[int], second: list[int], block_size: int) -> None:
    hashes = hash_blocks(first, block_size), hash_blocks(second, block_size)
    assert [len(h) for h in hashes] == [len(first) // block_size, len(second) // block_size]
    num_equal_tokens = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    num_equal_blocks = sum(a == b for a, b in zip(*hashes, strict=False))
    assert num_equal_blocks == num_equal_tokens // block_size


def test_the_same_block_behind_another_prefix_has_another_hash() -> None:
    assert hash_blocks([1, 2, 3, 4], 2)[1] != hash_blocks([9, 2, 3, 4], 2)[1]


def test_the_chain_can_be_built_block_by_block() -> None:
    parent = hash_block(ROOT, [1, 2])
    assert hash_blocks([1, 2, 3, 4, 5], 2) == [parent, hash_block(parent, [3, 4])]


def test_adapter_and_salt_separate_caches() -> None:
    roots = [root_hash(), root_hash("a"), root_hash(None, "a"), root_hash("a", "b"), root_hash("b", "a")]
    assert roots[0] == ROOT
    assert len(set(roots)) == len(roots)


def test_hashes_are_the_same_in_every_process() -> None:
    assert hash_blocks([1, 2, 3], 3)[0].hex() == "bdd28a549d08cf64c716f617ca7a1091"

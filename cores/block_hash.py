"""Chained hashes of full token blocks: equal hashes mean equal prefixes, so a cache and a balancer can agree on them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes  # 16 bytes

ROOT: BlockHash = b"\0" * 16


def root_hash(lora_id: str | None = None, cache_salt: str | None = None) -> BlockHash:
    """The parent of a request's first block. Adapter and salt separate caches that must not be shared.

    The adapter's id and not its name: another adapter may have that name tomorrow.
    """
    if not lora_id and not cache_salt:
        return ROOT
    return hashlib.blake2b(f"{lora_id or ''}\0{cache_salt or ''}".encode(), digest_size=16).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block after `parent`. A keyed, cryptographic hash: a collision would serve one user another's cache."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16, key=parent).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, parent: BlockHash = ROOT) -> list[BlockHash]:
    """Hashes of every full block of `token_ids`, in order."""
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes

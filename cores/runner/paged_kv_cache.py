"""The memory that holds K and V, in blocks, and how many blocks fit. Knows no requests: the scheduler hands out the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cores.config import ConfigError

# Without a setting, a CPU engine takes this share of the memory that is free once the weights are there, at most so much:
# several engines usually share one machine and each sees the whole of it.
CPU_MEMORY_SHARE = 0.10
CPU_MAX_BYTES = 4 << 30
# On a GPU, so much of the memory that is free is used: the rest is for the allocator's fragments and CUDA's own state.
CUDA_UTILISATION = 0.90


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """Everything about the cache but its length."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def choose_num_kv_blocks(
    shape: KVCacheShape,
    *,
    free_bytes: int,
    is_cuda: bool,
    max_model_len: int,
    must_hold_model_len: bool,
    max_num_seqs: int,
    num_kv_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_share_bytes: int | None = None,
    step_bytes: int = 0,
) -> int:
    """As many blocks as were asked for, else as the free memory gives. Raises `ConfigError` with the numbers.

    On a GPU, `step_bytes` is what a step needs besides, and `gpu_share_bytes` what --gpu-memory-utilization leaves for both.
    """
    if num_kv_blocks is not None:
        num_blocks, wanted_by = num_kv_blocks, f"--num-kv-blocks {num_kv_blocks}"
    elif kv_cache_memory_bytes is not None:
        num_blocks, wanted_by = kv_cache_memory_bytes // shape.block_bytes, f"--kv-cache-memory-bytes {kv_cache_memory_bytes}"
    else:
        source = "free memory"
        if is_cuda and gpu_share_bytes is not None:
            budget, source = max(0.0, gpu_share_bytes - step_bytes), "what --gpu-memory-utilization leaves"
        elif is_cuda:
            budget = max(0.0, free_bytes * CUDA_UTILISATION - step_bytes)
        else:
            budget = min(CPU_MAX_BYTES, free_bytes * CPU_MEMORY_SHARE)
        # More than every sequence at its longest is never used.
        most = max_num_seqs * shape.num_blocks_for(max_model_len)
        num_blocks, wanted_by = min(most, int(budget) // shape.block_bytes), f"{_mib(int(budget))} of {source}"
    # The scheduler lowers the model length to what the cache holds: fine, unless somebody asked for that length.
    needed = max_model_len if must_hold_model_len else 2  # a prompt of one token and its answer
    if num_blocks < shape.num_blocks_for(needed):
        raise ConfigError(
            f"{wanted_by} gives a KV cache of {num_blocks} blocks of {shape.block_size} tokens, but one sequence of"
            f" {needed} tokens needs {shape.num_blocks_for(needed)} of them"
            f" ({_mib(shape.num_blocks_for(needed) * shape.block_bytes)})"
        )
    needed_bytes, left_bytes = num_blocks * shape.block_bytes, free_bytes - step_bytes
    if needed_bytes > left_bytes:
        raise ConfigError(f"{wanted_by} needs {_mib(needed_bytes)} for the KV cache, but only {_mib(left_bytes)} are free")
    return num_blocks


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


class PagedKVCache:
    """K and V of every layer, `[layers, 2, blocks, block_size, kv_heads, head_dim]`.

    Invariant: a block is cleared when a sequence starts to fill it, so what lies behind a sequence's last token is finite.
    Masked positions have weight 0, but 0 × NaN is NaN: without it, one request's NaN would reach whoever gets the block next.
    """

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        self.block_size = shape.block_size
        # One block more than the scheduler knows of: it pads block tables of unequal length, and nobody writes there.
        self.padding_block = num_blocks
        size = (shape.num_layers, 2, num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        # Not zeroed: on a CPU the pages then cost nothing until they are used.
        self._storage = torch.empty(size, dtype=shape.dtype, device=device)
        self._storage[:, :, self.padding_block] = 0
        self._blocks = [(layer[0], layer[1]) for layer in self._storage]
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._blocks]

    def clear_blocks(self, block_ids: torch.Tensor) -> None:
        self._storage.index_fill_(2, block_ids, 0)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """`slots` [T]: block × block_size + offset; `key` and `value` [T, kv_heads, head_dim]."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def read(self, layer: int, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [sequences, kv_heads, blocks × block_size, head_dim], of a [sequences, blocks] table."""
        num_seqs, num_blocks = block_table.shape
        flat_table = block_table.flatten()
        keys, values = (
            # index_select: a third of the time that indexing with the table takes on a CPU.
            blocks.index_select(0, flat_table).view(num_seqs, num_blocks * blocks.shape[1], *blocks.shape[2:]).transpose(1, 2)
            for blocks in self._blocks[layer]
        )
        return keys, values

    def blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as they lie there, each [blocks, block_size, kv_heads, head_dim]."""
        return self._blocks[layer]

    def unwritten_layers(self, block_id: int, offset: int) -> list[int]:
        """The layers that have left one slot of a cleared block as it was."""
        written = (self._storage[:, 0, block_id, offset] != 0).flatten(1).any(dim=1)
        return [layer for layer, is_written in enumerate(written.tolist()) if not is_written]

"""Attention with torch's `varlen_attn`, FlashAttention over a ragged row: one call per layer, whatever is in the batch.

K and V are read where they lie, through block tables. For that the kernel asks for blocks of a multiple of 256 tokens, for
16-bit numbers, heads of at most 256 dimensions, and an Ampere GPU or newer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch

from cores.runner.interface import SchedulerOutput
from cores.runner.paged_kv_cache import PagedKVCache

BLOCK_SIZE_MULTIPLE = 256
MAX_HEAD_DIM = 256
CAUSAL = (-1, 0)  # everything to the left, nothing to the right

Kernel = Callable[..., torch.Tensor]


def find_kernel() -> Kernel | None:
    """torch's, if it has one that takes block tables (2.13)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    return cast(Kernel, varlen_attn)  # one tensor, as long as nobody asks it for more


def can_use_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_kernel() is not None
    )


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """An `AttentionStep`."""

    kernel: Kernel
    cache: PagedKVCache
    slots: torch.Tensor  # [T] int64: where each token's K and V go
    cu_seq_q: torch.Tensor  # [n + 1] int32: where each sequence's tokens begin in the row, and where the last one's end
    cu_seq_k: torch.Tensor  # [n + 1] int32: the same of contexts with tokens
    seqused_k: torch.Tensor  # [n] int32: their lengths
    block_table: torch.Tensor  # [n, blocks] int32
    max_q: int
    max_k: int

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        self.cache.write(layer, self.slots, key, value)
        key_blocks, value_blocks = self.cache.blocks(layer)
        return self.kernel(
            query,
            key_blocks,
            value_blocks,
            self.cu_seq_q,
            self.cu_seq_k,
            self.max_q,
            self.max_k,
            scale=scaling,
            window_size=CAUSAL,
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self.seqused_k,
            block_table=self.block_table,
        )


def make_varlen_attention(
    batch: SchedulerOutput, cache: PagedKVCache, slots: torch.Tensor, *, kernel: Kernel
) -> VarlenAttention:
    num_tokens = [scheduled.num_tokens for scheduled in batch.scheduled]
    lengths = [scheduled.request.num_computed_tokens + scheduled.num_tokens for scheduled in batch.scheduled]
    num_blocks = [-(-length // cache.block_size) for length in lengths]
    width = max(num_blocks)
    padding = [cache.padding_block] * width
    table = [(s.request.block_ids[:n] + padding)[:width] for s, n in zip(batch.scheduled, num_blocks, strict=True)]

    def tensor(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=slots.device)

    return VarlenAttention(
        kernel=kernel,
        cache=cache,
        slots=slots,
        cu_seq_q=tensor([0, *accumulate(num_tokens)]),
        cu_seq_k=tensor([0, *accumulate(lengths)]),
        seqused_k=tensor(lengths),
        block_table=tensor(table),
        max_q=max(num_tokens),
        max_k=max(lengths),
    )

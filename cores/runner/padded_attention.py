"""Attention with torch's own `scaled_dot_product_attention`: on any device, in any type. Knows no model.

Decodes, one query token each, run as a few padded batches; so do short prefill chunks. Every long chunk runs alone. Where a CPU
has kernels, decodes are not padded: see `cpu_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cores.runner.cpu_kernels import CpuKernels
from cores.runner.interface import ScheduledRequest, SchedulerOutput
from cores.runner.paged_kv_cache import PagedKVCache

# Sequences share a padded batch if their context lengths, in blocks, round up to the same power of two, or to this at least.
# So less than half of a long batch is padding, and short contexts, which are cheap to pad, stay together.
MIN_GROUP_BLOCKS = 16
# Chunks of up to so many tokens share one, too. Longer ones gain nothing: 32 chunks of 10 tokens took 1.2 ms a layer together
# and 2.2 ms alone, chunks of 30 the same either way, and of 94 half as long alone.
MAX_SHORT_CHUNK = 16


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length, computed as one padded batch."""

    rows: torch.Tensor | None  # [n] int64, positions in the row; None: the row's first n
    block_table: torch.Tensor  # [n, blocks] int64
    mask: torch.Tensor  # [n, 1, 1, blocks × block_size], 0 where visible and -inf elsewhere


@dataclass(frozen=True, slots=True)
class PagedDecodes:
    """Decodes of any context length, the row's first n. Their K and V are read where they lie."""

    kernels: CpuKernels
    block_table: torch.Tensor  # [n, blocks] int64
    lengths: torch.Tensor  # [n] int64

    def attend(self, cache: PagedKVCache, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """`query` [T, heads, head_dim] of the whole row."""
        keys, values = cache.blocks(layer)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        query = query[: len(self.lengths)]
        return self.kernels.decode_attention(query, keys, values, self.block_table, self.lengths, scale)


@dataclass(frozen=True, slots=True)
class ShortChunkGroup:
    """Short prefill chunks of similar length and context, each padded at its end by repeating its last token."""

    rows: torch.Tensor  # [n × length] int64, positions in the row, by chunk
    length: int
    block_table: torch.Tensor  # [n, blocks] int64 of context and chunk
    mask: torch.Tensor  # [n, 1, length, blocks × block_size], 0 where visible and -inf elsewhere


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence. Without a context the chunk sees only itself, and nothing is read back."""

    start: int  # position in the row
    length: int
    block_table: torch.Tensor | None  # [1, blocks] int64 of context and chunk; None: no context
    mask: torch.Tensor | None  # [length, blocks × block_size], 0 where visible and -inf elsewhere


@dataclass(frozen=True, slots=True)
class PaddedAttention:
    """An `AttentionStep`."""

    cache: PagedKVCache
    slots: torch.Tensor  # [T] int64: where each token's K and V go
    paged: PagedDecodes | None
    decodes: list[DecodeGroup]
    short_chunks: list[ShortChunkGroup]
    prefills: list[PrefillChunk]

    @property
    def has_prefills(self) -> bool:
        return bool(self.short_chunks or self.prefills)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        self.cache.write(layer, self.slots, key, value)
        if self.paged is not None and not self.has_prefills:
            return self.paged.attend(self.cache, layer, query, scaling)
        if len(self.decodes) == 1 and not self.has_prefills:
            return _decode(self.decodes[0], self.cache, layer, query, scaling)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self.paged is not None:
            out[: len(self.paged.lengths)] = self.paged.attend(self.cache, layer, query, scaling)
        for group in self.decodes:
            if group.rows is None:
                num_seqs = len(group.block_table)
                out[:num_seqs] = _decode(group, self.cache, layer, query[:num_seqs], scaling)
            else:
                out.index_copy_(0, group.rows, _decode(group, self.cache, layer, query.index_select(0, group.rows), scaling))
        for chunks in self.short_chunks:
            _prefill_together(chunks, self.cache, layer, query, out, scaling)
        for chunk in self.prefills:
            _prefill(chunk, self.cache, layer, query, key, value, out, scaling)
        return out


def _decode(group: DecodeGroup, cache: PagedKVCache, layer: int, q: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """`q` [n, heads, head_dim], a row for each of the group."""
    num_seqs = len(q)
    keys, values = cache.read(layer, group.block_table)
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], keys.shape[1]
    # The query heads that share a KV head are the rows of one small matrix, so K and V are read once for all of them.
    packed = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scaling)
    return result.reshape(num_seqs, num_heads, head_dim)


def _prefill_together(
    chunks: ShortChunkGroup, cache: PagedKVCache, layer: int, queries: torch.Tensor, out: torch.Tensor, scaling: float | None
) -> None:
    num_chunks = len(chunks.block_table)
    q = queries.index_select(0, chunks.rows).view(num_chunks, chunks.length, *queries.shape[1:]).transpose(1, 2)
    keys, values = cache.read(layer, chunks.block_table)
    is_gqa = q.shape[1] != keys.shape[1]
    result = F.scaled_dot_product_attention(q, keys, values, attn_mask=chunks.mask, scale=scaling, enable_gqa=is_gqa)
    # Where a chunk is padded its last row is written several times, each time with the same numbers.
    out.index_copy_(0, chunks.rows, result.transpose(1, 2).reshape(len(chunks.rows), *queries.shape[1:]))


def _prefill(
    chunk: PrefillChunk,
    cache: PagedKVCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    scaling: float | None,
) -> None:
    tokens = slice(chunk.start, chunk.start + chunk.length)
    if chunk.block_table is None:
        keys, values = key[tokens].transpose(0, 1)[None], value[tokens].transpose(0, 1)[None]
    else:
        keys, values = cache.read(layer, chunk.block_table)
    result = F.scaled_dot_product_attention(
        query[tokens].transpose(0, 1)[None],
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    out[tokens] = result[0].transpose(0, 1)


# --- from the scheduler's batch -----------------------------------------------------------------------------------------


def make_padded_attention(
    batch: SchedulerOutput,
    cache: PagedKVCache,
    slots: torch.Tensor,
    *,
    dtype: torch.dtype,
    kernels: CpuKernels | None = None,
) -> PaddedAttention:
    maker = _Maker(cache, dtype, slots.device)
    decodes = batch.scheduled[: batch.num_decodes]
    paged = maker.paged_decodes(decodes, kernels) if decodes and kernels is not None else None
    groups = maker.decode_groups(decodes) if paged is None else []
    short, prefills, row = [], [], batch.num_decodes
    for scheduled in batch.scheduled[batch.num_decodes :]:
        if scheduled.num_tokens <= MAX_SHORT_CHUNK:
            short.append((row, scheduled))
        else:
            prefills.append(maker.prefill_chunk(row, scheduled))
        row += scheduled.num_tokens
    return PaddedAttention(cache, slots, paged, groups, maker.short_chunk_groups(short), prefills)


class _Maker:
    """Groups, tables and masks. Built on the host, then moved."""

    def __init__(self, cache: PagedKVCache, dtype: torch.dtype, device: torch.device) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._dtype = dtype
        self._device = device

    def paged_decodes(self, decodes: list[ScheduledRequest], kernels: CpuKernels) -> PagedDecodes:
        table, _ = self._block_table(decodes)
        return PagedDecodes(kernels, table, torch.tensor([s.request.num_computed_tokens + 1 for s in decodes]))

    def decode_groups(self, decodes: list[ScheduledRequest]) -> list[DecodeGroup]:
        by_size: dict[int, list[int]] = {}
        for row, scheduled in enumerate(decodes):
            by_size.setdefault(self._size_class(scheduled), []).append(row)
        groups = []
        for rows in by_size.values():
            table, width = self._block_table([decodes[row] for row in rows])
            lengths = [decodes[row].request.num_computed_tokens + 1 for row in rows]
            visible = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
            positions = None if len(by_size) == 1 else torch.tensor(rows, device=self._device)
            groups.append(DecodeGroup(positions, table, self._mask(visible)[:, None, None]))
        return groups

    def short_chunk_groups(self, chunks: list[tuple[int, ScheduledRequest]]) -> list[ShortChunkGroup]:
        """`chunks` with the position of each in the row."""
        by_size: dict[tuple[int, int], list[tuple[int, ScheduledRequest]]] = {}
        for row, scheduled in chunks:
            size = (scheduled.num_tokens - 1).bit_length(), self._size_class(scheduled)
            by_size.setdefault(size, []).append((row, scheduled))
        groups = []
        for members in by_size.values():
            length = max(scheduled.num_tokens for _, scheduled in members)
            table, width = self._block_table([scheduled for _, scheduled in members])
            offsets = [[min(i, scheduled.num_tokens - 1) for i in range(length)] for _, scheduled in members]
            rows = [row + offset for (row, _), own in zip(members, offsets, strict=True) for offset in own]
            contexts = torch.tensor([scheduled.request.num_computed_tokens for _, scheduled in members])
            last_visible = contexts[:, None] + torch.tensor(offsets)  # [n, length]
            visible = torch.arange(width) <= last_visible[..., None]
            groups.append(ShortChunkGroup(torch.tensor(rows, device=self._device), length, table, self._mask(visible)[:, None]))
        return groups

    def prefill_chunk(self, row: int, scheduled: ScheduledRequest) -> PrefillChunk:
        num_context, length = scheduled.request.num_computed_tokens, scheduled.num_tokens
        if num_context == 0:
            return PrefillChunk(start=row, length=length, block_table=None, mask=None)
        table, width = self._block_table([scheduled])
        visible = torch.arange(width)[None] <= torch.arange(num_context, num_context + length)[:, None]
        return PrefillChunk(start=row, length=length, block_table=table, mask=self._mask(visible))

    def _num_blocks(self, scheduled: ScheduledRequest) -> int:
        """Up to the last token computed in this step. Blocks reserved for later ones are not cleared yet."""
        return -(-(scheduled.request.num_computed_tokens + scheduled.num_tokens) // self._block_size)

    def _size_class(self, scheduled: ScheduledRequest) -> int:
        return max(MIN_GROUP_BLOCKS, 1 << (self._num_blocks(scheduled) - 1).bit_length())

    def _block_table(self, members: Sequence[ScheduledRequest]) -> tuple[torch.Tensor, int]:
        """[n, blocks] int64, padded; and its width in tokens."""
        num_blocks = [self._num_blocks(scheduled) for scheduled in members]
        width = max(num_blocks)
        padding = [self._cache.padding_block] * width
        table = [(s.request.block_ids[:n] + padding)[:width] for s, n in zip(members, num_blocks, strict=True)]
        return torch.tensor(table, device=self._device), width * self._block_size

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """Made once per step. From a boolean mask SDPA would make the same in every layer."""
        return torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, float("-inf")).to(self._device)

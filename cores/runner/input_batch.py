"""Turns the scheduler's batch into tensors: one ragged row of tokens, where their K and V go, and who attends to what.

Knows no model and no sampling. Everything is built from lists on the host in one pass and moved to the device at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cores.runner.attention import AttentionMetadata, DecodeGroup, PrefillChunk
from cores.runner.interface import ScheduledRequest, SchedulerOutput
from cores.runner.paged_kv_cache import PagedKVCache

# Decodes share a padded batch if their context lengths, in blocks, round up to the same power of two, or to this at least.
# So less than half of a long batch is padding, and short contexts, which are cheap to pad, stay together.
MIN_GROUP_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens of one request whose log-probabilities are wanted: the logits at each position are about the next token."""

    index: int  # of the request in `SchedulerOutput.scheduled`
    start: int  # the first position whose logits count
    length: int


@dataclass(frozen=True, slots=True)
class InputBatch:
    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64
    # [S + P] int64: positions in the row whose logits are wanted. First those that sample, in the order of `scheduled`; then
    # those of `prompt_spans`, one after the other.
    logits_rows: torch.Tensor
    num_sampled: int
    prompt_spans: list[PromptSpan]
    metadata: AttentionMetadata


def build_input_batch(
    batch: SchedulerOutput, cache: PagedKVCache, block_size: int, dtype: torch.dtype, device: torch.device
) -> InputBatch:
    """Also clears the cache blocks in which a sequence begins with this step: see `PagedKVCache`."""
    input_ids: list[int] = []
    position_ids: list[int] = []
    slots: list[int] = []
    begun_blocks: list[int] = []
    sampled_rows: list[int] = []
    prompt_rows: list[int] = []
    prompt_spans: list[PromptSpan] = []
    prefills: list[PrefillChunk] = []
    for i, scheduled in enumerate(batch.scheduled):
        request = scheduled.request
        start, end, blocks = request.num_computed_tokens, request.num_computed_tokens + scheduled.num_tokens, request.block_ids
        if i >= batch.num_decodes:
            prefills.append(_prefill_chunk(scheduled, len(input_ids), block_size, dtype, device))
        if request.needs_prompt_logprobs:
            length = min(end, request.num_original_prompt_tokens - 1) - start
            prompt_rows += range(len(input_ids), len(input_ids) + length)
            prompt_spans.append(PromptSpan(i, start, length))
        input_ids += request.token_ids[start:end]
        position_ids += range(start, end)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
        begun_blocks += blocks[-(-start // block_size) : -(-end // block_size)]
        if scheduled.samples:
            sampled_rows.append(len(input_ids) - 1)
    assert len(input_ids) == batch.num_tokens, f"{batch.num_tokens} tokens announced, {len(input_ids)} scheduled"

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    if begun_blocks:
        cache.clear_blocks(tensor(begun_blocks))
    decodes = _decode_groups(batch.scheduled[: batch.num_decodes], cache.padding_block, block_size, dtype, device)
    return InputBatch(
        input_ids=tensor(input_ids)[None],
        position_ids=tensor(position_ids)[None],
        logits_rows=tensor(sampled_rows + prompt_rows),
        num_sampled=len(sampled_rows),
        prompt_spans=prompt_spans,
        metadata=AttentionMetadata(cache=cache, slots=tensor(slots), decodes=decodes, prefills=prefills),
    )


def _decode_groups(
    decodes: list[ScheduledRequest], padding_block: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    by_size: dict[int, list[int]] = {}
    for row, scheduled in enumerate(decodes):
        num_blocks = scheduled.request.num_computed_tokens // block_size + 1
        by_size.setdefault(max(MIN_GROUP_BLOCKS, 1 << (num_blocks - 1).bit_length()), []).append(row)
    groups = []
    for rows in by_size.values():
        lengths = [decodes[row].request.num_computed_tokens + 1 for row in rows]
        width = -(-max(lengths) // block_size)
        padding = [padding_block] * width
        # Blocks behind the current token, reserved for later ones, are cut off: they are not cleared yet.
        table = [
            (decodes[row].request.block_ids[: -(-length // block_size)] + padding)[:width]
            for row, length in zip(rows, lengths, strict=True)
        ]
        visible = torch.arange(width * block_size)[None] < torch.tensor(lengths)[:, None]
        groups.append(
            DecodeGroup(
                rows=None if len(by_size) == 1 else torch.tensor(rows, device=device),
                block_table=torch.tensor(table, device=device),
                mask=_additive_mask(visible, dtype, device)[:, None, None],
            )
        )
    return groups


def _prefill_chunk(
    scheduled: ScheduledRequest, row: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> PrefillChunk:
    request, length = scheduled.request, scheduled.num_tokens
    num_context = request.num_computed_tokens
    if num_context == 0:
        return PrefillChunk(start=row, length=length, block_table=None, mask=None)
    block_ids = request.block_ids[: -(-(num_context + length) // block_size)]
    visible = torch.arange(len(block_ids) * block_size)[None] <= torch.arange(num_context, num_context + length)[:, None]
    return PrefillChunk(
        start=row,
        length=length,
        block_table=torch.tensor([block_ids], device=device),
        mask=_additive_mask(visible, dtype, device),
    )


def _additive_mask(visible: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Made once per step. From a boolean mask SDPA would make the same in every layer."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).to(device)

"""Turns the scheduler's batch into tensors: one ragged row of tokens, and where their K and V go.

Knows no model and no sampling, nor who attends to what. Everything is built from lists on the host in one pass and moved to the
device at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cores.runner.attention import AttentionStep, MakeAttentionStep
from cores.runner.interface import SchedulerOutput
from cores.runner.paged_kv_cache import PagedKVCache


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
    attention: AttentionStep


def build_input_batch(
    batch: SchedulerOutput, cache: PagedKVCache, make_attention: MakeAttentionStep, device: torch.device
) -> InputBatch:
    """Also clears the cache blocks in which a sequence begins with this step: see `PagedKVCache`."""
    input_ids: list[int] = []
    position_ids: list[int] = []
    slots: list[int] = []
    begun_blocks: list[int] = []
    sampled_rows: list[int] = []
    prompt_rows: list[int] = []
    prompt_spans: list[PromptSpan] = []
    block_size = cache.block_size
    for i, scheduled in enumerate(batch.scheduled):
        request = scheduled.request
        start, end, blocks = request.num_computed_tokens, request.num_computed_tokens + scheduled.num_tokens, request.block_ids
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
    return InputBatch(
        input_ids=tensor(input_ids)[None],
        position_ids=tensor(position_ids)[None],
        logits_rows=tensor(sampled_rows + prompt_rows),
        num_sampled=len(sampled_rows),
        prompt_spans=prompt_spans,
        attention=make_attention(batch, cache, tensor(slots)),
    )

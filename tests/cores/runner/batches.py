"""Batches made by hand, as the scheduler would make them."""

from __future__ import annotations

import torch

from cores.request import Request
from cores.runner.interface import ScheduledRequest, SchedulerOutput
from cores.runner.paged_kv_cache import KVCacheShape, PagedKVCache
from cores.testing import make_request

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def make_cache(num_blocks: int = 200, *, num_kv_heads: int = 1, head_dim: int = 2) -> PagedKVCache:
    shape = KVCacheShape(num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.float32)
    return PagedKVCache(shape, num_blocks, CPU)


def make(tokens: list[int], num_computed: int, block_ids: list[int]) -> Request:
    request = Request.from_engine_core_request(0, make_request(1, tokens), max_model_len=1000)
    request.num_computed_tokens, request.block_ids = num_computed, block_ids
    return request


def make_batch(decodes: list[Request], prefills: list[tuple[Request, int]]) -> SchedulerOutput:
    """`prefills` with the number of tokens that each computes."""
    scheduled = [ScheduledRequest(r, 1, True) for r in decodes]
    scheduled += [ScheduledRequest(r, n, r.num_computed_tokens + n == r.num_tokens) for r, n in prefills]
    return SchedulerOutput(scheduled, len(decodes), sum(s.num_tokens for s in scheduled))


def slots_of(batch: SchedulerOutput) -> torch.Tensor:
    slots = []
    for scheduled in batch.scheduled:
        request = scheduled.request
        for position in range(request.num_computed_tokens, request.num_computed_tokens + scheduled.num_tokens):
            slots.append(request.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    return torch.tensor(slots)

"""One step's batch as tensors: which tokens, where their K and V go, who sees what."""

from __future__ import annotations

import torch

from cores.request import Request
from cores.runner.input_batch import MIN_GROUP_BLOCKS, InputBatch, build_input_batch
from cores.runner.interface import ScheduledRequest, SchedulerOutput
from cores.runner.paged_kv_cache import KVCacheShape, PagedKVCache
from cores.testing import make_request

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def make_cache(num_blocks: int = 200) -> PagedKVCache:
    shape = KVCacheShape(num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    return PagedKVCache(shape, num_blocks, CPU)


def make(tokens: list[int], num_computed: int, block_ids: list[int]) -> Request:
    request = Request.from_engine_core_request(0, make_request(1, tokens), max_model_len=1000)
    request.num_computed_tokens, request.block_ids = num_computed, block_ids
    return request


def build(cache: PagedKVCache, decodes: list[Request], prefills: list[tuple[Request, int]]) -> InputBatch:
    scheduled = [ScheduledRequest(r, 1, True) for r in decodes]
    scheduled += [ScheduledRequest(r, n, r.num_computed_tokens + n == r.num_tokens) for r, n in prefills]
    batch = SchedulerOutput(scheduled, len(decodes), sum(s.num_tokens for s in scheduled))
    return build_input_batch(batch, cache, BLOCK_SIZE, torch.float32, CPU)


def test_decodes_and_chunks_lie_in_one_row() -> None:
    decode = make([10, 11, 12, 13, 14], 4, [7, 3])
    first_chunk = make([20, 21, 22, 23, 24, 25], 0, [5, 6])
    last_chunk = make([30, 31, 32, 33, 34, 35], 3, [8, 9])
    inputs = build(make_cache(), [decode], [(first_chunk, 5), (last_chunk, 3)])
    assert inputs.input_ids.tolist() == [[14, 20, 21, 22, 23, 24, 33, 34, 35]]
    assert inputs.position_ids.tolist() == [[4, 0, 1, 2, 3, 4, 3, 4, 5]]
    assert inputs.metadata.slots.tolist() == [12, 20, 21, 22, 23, 24, 35, 36, 37]
    assert inputs.logits_rows.tolist() == [0, 8]  # the chunk that does not reach its prompt's end samples nothing
    fresh, continued = inputs.metadata.prefills
    assert (fresh.start, fresh.length, fresh.block_table, fresh.mask) == (1, 5, None, None)
    assert (continued.start, continued.length) == (6, 3)
    assert continued.block_table is not None
    assert continued.block_table.tolist() == [[8, 9]]
    assert continued.mask is not None
    assert [int(row.isfinite().sum()) for row in continued.mask] == [4, 5, 6]


def test_decodes_are_padded_with_a_block_that_no_request_owns() -> None:
    cache = make_cache(num_blocks=20)
    short, long = make([1] * 3, 2, [4]), make([2] * 10, 9, [0, 1, 2])
    (group,) = build(cache, [short, long], []).metadata.decodes
    assert group.rows is None
    assert group.block_table.tolist() == [[4, 20, 20], [0, 1, 2]]
    assert [int(row.isfinite().sum()) for row in group.mask] == [3, 10]


def test_blocks_reserved_for_later_tokens_are_not_read() -> None:
    decode = make([1] * 4, 3, [6, 9, 2])
    (group,) = build(make_cache(), [decode], []).metadata.decodes
    assert group.block_table.tolist() == [[6]]


def test_a_long_decode_does_not_pad_the_short_ones() -> None:
    num_long = (MIN_GROUP_BLOCKS + 1) * BLOCK_SIZE
    short, long = make([1] * 5, 4, [150, 151]), make([2] * num_long, num_long - 1, list(range(MIN_GROUP_BLOCKS + 1)))
    groups = build(make_cache(), [short, long, short], []).metadata.decodes
    rows = [group.rows.tolist() for group in groups if group.rows is not None]
    assert rows == [[0, 2], [1]]
    assert [group.block_table.shape[1] for group in groups] == [2, MIN_GROUP_BLOCKS + 1]


def test_a_block_is_cleared_when_a_sequence_begins_it_and_not_later() -> None:
    cache = make_cache()
    everywhere = torch.arange(201 * BLOCK_SIZE)
    nan = torch.full((len(everywhere), 1, 2), float("nan"))
    for layer in range(2):
        cache.write(layer, everywhere, nan, nan)
    build(cache, [make([1] * 5, 4, [10, 11]), make([1] * 7, 6, [12, 13])], [(make([1] * 9, 0, [14, 15, 16]), 6)])
    for layer in range(2):
        keys, values = cache.read(layer, torch.tensor([[10, 11, 12, 13, 14, 15, 16]]))
        for cached in (keys, values):
            clean = cached.view(7, -1).isfinite().all(dim=1).tolist()
            assert clean == [False, True, False, False, True, True, False]

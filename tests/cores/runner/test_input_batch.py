"""One step's batch as tensors: which tokens, where their K and V go, whose logits are wanted."""

from __future__ import annotations

from functools import partial

import torch

from cores.request import Request
from cores.runner.input_batch import InputBatch, build_input_batch
from cores.runner.padded_attention import PaddedAttention, make_padded_attention
from cores.runner.paged_kv_cache import PagedKVCache
from tests.cores.runner.batches import BLOCK_SIZE, CPU, make, make_batch, make_cache, slots_of


def build(cache: PagedKVCache, decodes: list[Request], prefills: list[tuple[Request, int]]) -> InputBatch:
    make_attention = partial(make_padded_attention, dtype=torch.float32)
    return build_input_batch(make_batch(decodes, prefills), cache, make_attention, CPU)


def test_decodes_and_chunks_lie_in_one_row() -> None:
    decode = make([10, 11, 12, 13, 14], 4, [7, 3])
    first_chunk = make([20, 21, 22, 23, 24, 25], 0, [5, 6])
    last_chunk = make([30, 31, 32, 33, 34, 35], 3, [8, 9])
    inputs = build(make_cache(), [decode], [(first_chunk, 5), (last_chunk, 3)])
    assert inputs.input_ids.tolist() == [[14, 20, 21, 22, 23, 24, 33, 34, 35]]
    assert inputs.position_ids.tolist() == [[4, 0, 1, 2, 3, 4, 3, 4, 5]]
    assert inputs.logits_rows.tolist() == [0, 8]  # the chunk that does not reach its prompt's end samples nothing
    assert isinstance(inputs.attention, PaddedAttention)
    assert inputs.attention.slots.tolist() == [12, 20, 21, 22, 23, 24, 35, 36, 37]
    assert slots_of(make_batch([decode], [(first_chunk, 5), (last_chunk, 3)])).tolist() == inputs.attention.slots.tolist()


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

"""Every way to compute a step's attention gives what each sequence alone would get, whatever is in the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from cores.runner.attention import MakeAttentionStep
from cores.runner.interface import SchedulerOutput
from cores.runner.padded_attention import MAX_SHORT_CHUNK, MIN_GROUP_BLOCKS, PaddedAttention, make_padded_attention
from cores.runner.paged_kv_cache import PagedKVCache
from cores.runner.varlen_attention import CAUSAL, can_use_varlen, find_kernel, make_varlen_attention
from tests.cores.runner.batches import BLOCK_SIZE, CPU, make, make_batch, make_cache, slots_of

HEADS, KV_HEADS, HEAD_DIM, LAYER, SCALE = 6, 2, 8, 1, 0.3
LONG = MAX_SHORT_CHUNK + 9

padded = partial(make_padded_attention, dtype=torch.float32)


def varlen_reference(
    queries: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> torch.Tensor:
    """What torch documents of `varlen_attn`, sequence by sequence."""
    assert (options["window_size"], options["enable_gqa"]) == (CAUSAL, True)
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, options["seqused_k"], options["block_table"])} == {torch.int32}
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k == int(options["seqused_k"].max())
    assert cu_seq_k.diff().tolist() == options["seqused_k"].tolist()
    out = []
    for i, length in enumerate(options["seqused_k"].tolist()):
        q = queries[cu_seq_q[i] : cu_seq_q[i + 1]]
        table = options["block_table"][i].long()
        keys, values = (blocks[table].flatten(0, 1)[:length] for blocks in (key_blocks, value_blocks))
        out.append(attend_alone(q, keys, values, options["scale"]))
    return torch.cat(out)


def attend_alone(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """The last `len(q)` of `len(keys)` tokens of one sequence. All [tokens, heads, head_dim]."""
    keys, values = (states.repeat_interleave(q.shape[1] // states.shape[1], dim=1) for states in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    visible = torch.arange(len(keys)) <= torch.arange(len(keys) - len(q), len(keys))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(dim=-1), values)


@dataclass
class Sequence:
    """K and V of a whole sequence; its first `num_computed` tokens are in the cache before the step."""

    num_computed: int
    num_new: int

    def __post_init__(self) -> None:
        self.length = self.num_computed + self.num_new
        self.q = torch.randn(self.num_new, HEADS, HEAD_DIM)
        self.k = torch.randn(self.length, KV_HEADS, HEAD_DIM)
        self.v = torch.randn(self.length, KV_HEADS, HEAD_DIM)


def step_of(sequences: list[Sequence], cache: PagedKVCache) -> SchedulerOutput:
    decodes, prefills, first_block = [], [], 0
    for sequence in sequences:
        num_blocks = -(-sequence.length // BLOCK_SIZE) + 1  # one is reserved and not filled yet
        block_ids = list(range(first_block, first_block + num_blocks))[::-1]
        first_block += num_blocks
        request = make([1] * sequence.length, sequence.num_computed, block_ids)
        context = torch.tensor([block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(sequence.num_computed)])
        cache.clear_blocks(torch.tensor(block_ids))
        cache.write(LAYER, context.long(), sequence.k[: sequence.num_computed], sequence.v[: sequence.num_computed])
        if sequence.num_new == 1 and sequence.num_computed:
            decodes.append(request)
        else:
            prefills.append((request, sequence.num_new))
    return make_batch(decodes, prefills)


BATCHES = {
    "decodes": [(5, 1), (40, 1), (3, 1)],
    "decodes, one much longer": [(5, 1), ((MIN_GROUP_BLOCKS + 2) * BLOCK_SIZE, 1), (9, 1)],
    "fresh prompts, long and short": [(0, LONG), (0, 1), (0, 7), (0, LONG + 3), (0, MAX_SHORT_CHUNK)],
    "chunks behind contexts": [(12, LONG), (7, 5), (33, 6), (8, 8), (30, LONG)],
    "short chunks behind short and long contexts": [(4, 3), (MIN_GROUP_BLOCKS * BLOCK_SIZE * 2, 4), (5, 4), (0, 2)],
    "all kinds": [(5, 1), (70, 1), (0, LONG), (0, 3), (20, LONG), (20, 2), (0, 4)],
}  # (computed before, new)


@pytest.mark.parametrize(
    "make_attention",
    [pytest.param(padded, id="padded"), pytest.param(partial(make_varlen_attention, kernel=varlen_reference), id="varlen")],
)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_a_sequence_in_a_batch_gets_what_it_gets_alone(
    make_attention: MakeAttentionStep, lengths: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    cache = make_cache(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    sequences = [Sequence(*pair) for pair in lengths]
    batch = step_of(sequences, cache)
    step = make_attention(batch, cache, slots_of(batch))
    out = step.attend(
        LAYER,
        torch.cat([s.q for s in sequences]),
        torch.cat([s.k[s.num_computed :] for s in sequences]),
        torch.cat([s.v[s.num_computed :] for s in sequences]),
        SCALE,
    )
    torch.testing.assert_close(out, torch.cat([attend_alone(s.q, s.k, s.v, SCALE) for s in sequences]))


# --- padded batches -------------------------------------------------------------------------------------------------------


def padded_step(*args: Any, cache: PagedKVCache | None = None) -> PaddedAttention:
    batch = make_batch(*args)
    return padded(batch, cache or make_cache(), slots_of(batch))


def test_decodes_are_padded_with_a_block_that_no_request_owns() -> None:
    short, long = make([1] * 3, 2, [4]), make([2] * 10, 9, [0, 1, 2])
    (group,) = padded_step([short, long], [], cache=make_cache(num_blocks=20)).decodes
    assert group.rows is None
    assert group.block_table.tolist() == [[4, 20, 20], [0, 1, 2]]
    assert [int(visible.isfinite().sum()) for visible in group.mask] == [3, 10]


def test_blocks_reserved_for_later_tokens_are_not_read() -> None:
    (group,) = padded_step([make([1] * 4, 3, [6, 9, 2])], []).decodes
    assert group.block_table.tolist() == [[6]]


def test_a_long_decode_does_not_pad_the_short_ones() -> None:
    num_long = (MIN_GROUP_BLOCKS + 1) * BLOCK_SIZE
    short, long = make([1] * 5, 4, [150, 151]), make([2] * num_long, num_long - 1, list(range(MIN_GROUP_BLOCKS + 1)))
    groups = padded_step([short, long, short], []).decodes
    assert [group.rows.tolist() for group in groups if group.rows is not None] == [[0, 2], [1]]
    assert [group.block_table.shape[1] for group in groups] == [2, MIN_GROUP_BLOCKS + 1]


def test_short_chunks_share_a_batch_and_long_ones_run_alone() -> None:
    long = make([1] * LONG, 0, list(range(10)))
    fresh, continued = make([1] * 6, 0, [20, 21]), make([1] * 9, 4, [22, 23, 24])
    step = padded_step([], [(fresh, 6), (long, LONG), (continued, 5)])
    (group,), (alone,) = step.short_chunks, step.prefills
    assert (alone.start, alone.length, alone.block_table, alone.mask) == (6, LONG, None, None)
    assert group.rows.tolist() == [0, 1, 2, 3, 4, 5, *range(6 + LONG, 11 + LONG), 10 + LONG]
    assert group.block_table.tolist() == [[20, 21, 200], [22, 23, 24]]
    assert [[int(visible.isfinite().sum()) for visible in mask[0]] for mask in group.mask] == [
        [1, 2, 3, 4, 5, 6],
        [5, 6, 7, 8, 9, 9],
    ]


def test_a_long_chunk_behind_a_context_reads_it_back() -> None:
    request = make([1] * (LONG + 3), 3, list(range(8, 15)))
    (chunk,) = padded_step([], [(request, LONG)]).prefills
    assert chunk.block_table is not None
    assert chunk.block_table.tolist() == [list(range(8, 15))]
    assert chunk.mask is not None
    assert [int(visible.isfinite().sum()) for visible in chunk.mask] == list(range(4, LONG + 4))


# --- block tables -----------------------------------------------------------------------------------------------------------


def test_the_kernel_is_told_where_everything_lies() -> None:
    decode, chunk = make([1] * 5, 4, [7, 3]), make([1] * 12, 6, [5, 6, 2, 9])
    batch = make_batch([decode], [(chunk, 4)])
    step = make_varlen_attention(batch, make_cache(), slots_of(batch), kernel=varlen_reference)
    assert step.cu_seq_q.tolist() == [0, 1, 5]
    assert step.cu_seq_k.tolist() == [0, 5, 15]
    assert step.seqused_k.tolist() == [5, 10]
    assert step.block_table.tolist() == [[7, 3, 200], [5, 6, 2]]
    assert (step.max_q, step.max_k) == (4, 10)


def test_varlen_attention_is_for_gpus() -> None:
    assert not can_use_varlen(CPU, torch.bfloat16, 64)
    assert not can_use_varlen(torch.device("cuda", 0), torch.float32, 64)
    assert not can_use_varlen(torch.device("cuda", 0), torch.bfloat16, 260)


def test_this_torch_has_the_kernel_that_we_call() -> None:
    kernel = find_kernel()
    if kernel is None:
        pytest.skip(f"torch {torch.__version__} has no varlen_attn with block tables")
    batch = make_batch([make([1] * 5, 4, [7, 3])], [])
    states = torch.zeros(1, KV_HEADS, HEAD_DIM)
    cache = make_cache(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    step = make_varlen_attention(batch, cache, slots_of(batch), kernel=kernel)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):  # on a CPU: but the arguments are right
        step.attend(LAYER, torch.zeros(1, HEADS, HEAD_DIM), states, states, SCALE)

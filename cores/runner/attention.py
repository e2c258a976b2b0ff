"""Attention for transformers' models over a paged KV cache: the whole batch is one ragged row, [1, T].

Theory of operation
-------------------
A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention` in each layer. What the step's tokens belong
to comes along as one keyword argument, `attention_metadata`, that transformers hands through from the model's call. Decodes,
one query token each, run as a few padded batches; every prefill chunk runs alone. All other layers of a model treat tokens one
by one and never notice that the row holds several sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from cores.config import ConfigError
from cores.runner.paged_kv_cache import PagedKVCache

ATTENTION_NAME = "gateway_paged"

# What a model's layer may hand to its attention function that changes the result and that we do not compute.
UNSUPPORTED_ARGUMENTS = {
    "softcap": "soft-capping of attention logits",
    "s_aux": "attention sinks",
    "position_bias": "a position bias in attention",
}


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length, computed as one padded batch."""

    rows: torch.Tensor | None  # [n] int64, positions in the row; None: the row's first n
    block_table: torch.Tensor  # [n, blocks] int64
    mask: torch.Tensor  # [n, 1, 1, blocks × block_size], 0 where visible and -inf elsewhere


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence. Without a context the chunk sees only itself, and nothing is read back."""

    start: int  # position in the row
    length: int
    block_table: torch.Tensor | None  # [1, blocks] int64 of context and chunk; None: no context
    mask: torch.Tensor | None  # [length, blocks × block_size], 0 where visible and -inf elsewhere


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch as every layer sees it."""

    cache: PagedKVCache
    slots: torch.Tensor  # [T] int64: where each token's K and V go
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head_dim]
    key: torch.Tensor,  # [1, kv_heads, T, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_metadata: AttentionMetadata,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; the result is [1, T, heads, head_dim]."""
    _refuse_unsupported(module, kwargs)
    metadata, layer = attention_metadata, _layer_index(module)
    queries, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, head_dim]
    metadata.cache.write(layer, metadata.slots, keys, values)
    out = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    for group in metadata.decodes:
        _decode(group, metadata.cache, layer, queries, out, scaling)
    for chunk in metadata.prefills:
        _prefill(chunk, metadata.cache, layer, query, key, value, out, scaling)
    return out[None], None


def _decode(
    group: DecodeGroup, cache: PagedKVCache, layer: int, queries: torch.Tensor, out: torch.Tensor, scaling: float | None
) -> None:
    num_seqs = len(group.block_table)
    q = queries[:num_seqs] if group.rows is None else queries.index_select(0, group.rows)
    keys, values = cache.read(layer, group.block_table)
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], keys.shape[1]
    # The query heads that share a KV head are the rows of one small matrix, so K and V are read once for all of them.
    packed = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scaling)
    result = result.reshape(num_seqs, num_heads, head_dim)
    if group.rows is None:
        out[:num_seqs] = result
    else:
        out.index_copy_(0, group.rows, result)


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
        keys, values = key[:, :, tokens], value[:, :, tokens]
    else:
        keys, values = cache.read(layer, chunk.block_table)
    result = F.scaled_dot_product_attention(
        query[:, :, tokens],
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    out[tokens] = result[0].transpose(0, 1)


def _layer_index(module: torch.nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int), f"{type(module).__name__} has no layer index"
    return index


def _refuse_unsupported(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """The runner's trial step at load comes through here too, so a model that needs more is refused before it serves."""
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"model is not supported: {type(module).__name__} is not causal")
    for name, what in UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"model is not supported: {type(module).__name__} needs {what}")


# transformers looks attention functions up by name. The entry is a stateless function; a second import replaces it by itself.
# No mask function goes with it: without one, transformers builds no mask.
AttentionInterface.register(ATTENTION_NAME, paged_attention)

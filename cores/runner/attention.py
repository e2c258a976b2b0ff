"""Attention for transformers' models over a paged KV cache: the whole batch is one ragged row, [1, T].

Theory of operation
-------------------
A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention` in each layer. What the step's tokens belong
to comes along as one keyword argument, `attention_step`, that transformers hands through from the model's call. It computes the
layer: `PaddedAttention` anywhere, `VarlenAttention` where torch has FlashAttention. All other layers of a model treat tokens
one by one and never notice that the row holds several sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from cores.config import ConfigError
from cores.runner.interface import SchedulerOutput
from cores.runner.paged_kv_cache import PagedKVCache

ATTENTION_NAME = "gateway_paged"

# What a model's layer may hand to its attention function that changes the result and that we do not compute.
UNSUPPORTED_ARGUMENTS = {
    "softcap": "soft-capping of attention logits",
    "s_aux": "attention sinks",
    "position_bias": "a position bias in attention",
}


class AttentionStep(Protocol):
    """One step's batch as every layer sees it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Writes K and V, [T, kv_heads, head_dim], to the cache; returns what `query`, [T, heads, head_dim], finds there and
        before it, in its own shape."""
        ...


# From the batch, the cache and where each token's K and V go: slots [T] int64.
MakeAttentionStep = Callable[[SchedulerOutput, PagedKVCache, torch.Tensor], AttentionStep]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_step: AttentionStep,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: [1, heads, T, head_dim] goes in and [1, T, heads, head_dim] comes out."""
    _refuse_unsupported(module, kwargs)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return attention_step.attend(_layer_index(module), query, key, value, scaling)[None], None


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

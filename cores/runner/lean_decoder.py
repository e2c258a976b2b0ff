"""Models built like Llama, computed with few operations; in float32 the same numbers as transformers' own code, bit for bit.

transformers' modules spend 230 operations and 13 module calls on each layer of a step. Where it has few tokens, which is what
decoding is, these take as long as the matrix products: a step of 8 sequences of SmolLM2 took 106 ms, and takes 48 ms here (two
cores of a virtual machine). What a model of this family does is written down once; all others run as they came.

Where layers are packed (`packed_layers`) or there are kernels (`cpu_kernels`), less is rounded on the way, and bits differ as
they do between two batch shapes.

The modules, and the parameters in them, stay the model's own: new weights are in place here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from cores.runner.attention import AttentionStep
from cores.runner.cpu_kernels import CpuKernels
from cores.runner.packed_layers import Compute, PackedLinear, can_pack, join_linears

# Rotary embedding, grouped-query attention, SiLU-gated MLP, RMS norm before each of both; Qwen3 also norms each head.
CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# The first so many heads of [T, heads, head_dim], in place, by `cos` and `sin`.
Rotate = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _ExactNorm:
    """In transformers' order of sums and roundings."""

    weight: torch.nn.Parameter
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return self.weight * h.mul(h.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _FastNorm:
    """With fewer operations, and rounded once, at the end: 24 µs instead of 58 for 32 rows of SmolLM2's."""

    weight: torch.nn.Parameter
    eps: torch.Tensor  # []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return h.mul_(scale).mul_(self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    scaling: float
    head_dim: int
    num_heads: int
    num_kv_heads: int
    input_norm: Compute
    project: Compute  # query, key and value
    query_norm: Compute | None
    key_norm: Compute | None
    rotate: Rotate
    add_output: Combine
    mlp_norm: Compute
    gated: Compute
    add_down: Combine

    @classmethod
    def of(cls, module: Any, kernels: CpuKernels | None) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        return cls(
            index=attention.layer_idx,
            scaling=attention.scaling,
            head_dim=attention.head_dim,
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_kv_heads=attention.k_proj.out_features // attention.head_dim,
            input_norm=_norm(module.input_layernorm, kernels),
            project=join_linears(attention, "qkv_proj", [attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=_norm(attention.q_norm, kernels) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm, kernels) if hasattr(attention, "k_norm") else None,
            rotate=_rotate if kernels is None else kernels.rotate,
            add_output=_adding(attention.o_proj),
            mlp_norm=_norm(module.post_attention_layernorm, kernels),
            gated=_gating(mlp.gate_proj, mlp.up_proj),
            add_down=_adding(mlp.down_proj),
        )

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """`x` [T, hidden]; `cos` and `sin` [T, 1, head_dim], `sin` with the sign that its half needs."""
        states = self.project(self.input_norm(x)).view(len(x), -1, self.head_dim)
        query, key, value = states.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query.copy_(self.query_norm(query))
            key.copy_(self.key_norm(key))
        self.rotate(states, self.num_heads + self.num_kv_heads, cos, sin)
        found = step.attend(self.index, query, key, value, self.scaling)
        x = self.add_output(found.view(len(x), -1), x)
        return self.add_down(self.gated(self.mlp_norm(x)), x)


# In each of these: `forward`, not the module, whose call costs as much as a small product.


def _norm(norm: Any, kernels: CpuKernels | None) -> Compute:
    if kernels is not None:
        return partial(kernels.rms_norm, weight=norm.weight, eps=norm.variance_epsilon)
    if can_pack(norm.weight.device, norm.weight.dtype):
        return _FastNorm(norm.weight, torch.tensor(norm.variance_epsilon))
    return _ExactNorm(norm.weight, norm.variance_epsilon)


def _adding(linear: Any) -> Combine:
    """(h, x) → x + linear(h)"""
    if isinstance(linear, PackedLinear):
        return linear.plus
    return lambda h, x: x + linear.forward(h)


def _gating(gate: Any, up: Any) -> Compute:
    """h → silu(gate(h)) × up(h)"""
    if isinstance(gate, PackedLinear) and isinstance(up, PackedLinear):
        return lambda h: up.times(h, gate.silu(h))
    return lambda h: F.silu(gate.forward(h), inplace=True).mul_(up.forward(h))


def _rotate(states: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    x = states[:, :num_heads]
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1).mul_(sin)
    x.mul_(cos).add_(swapped)


class LeanDecoder:
    """In place of the model it is made of."""

    def __init__(self, model: Any, kernels: CpuKernels | None = None) -> None:
        """`kernels`: for a model in bfloat16 on a CPU."""
        self._embed = model.model.embed_tokens
        self._rotary = model.model.rotary_emb
        self._layers = [_Layer.of(layer, kernels) for layer in model.model.layers]
        self._norm = _norm(model.model.norm, kernels)
        self._head: Compute = model.lm_head.forward

    @staticmethod
    def can_compute(model: Any) -> bool:
        config = model.config
        return type(model).__name__ in CLASSES and config.hidden_act == "silu"

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention: AttentionStep, rows: torch.Tensor
    ) -> torch.Tensor:
        """[len(rows), vocabulary] for these positions of the row; `input_ids` and `position_ids` [1, T]."""
        x = self._embed(input_ids)[0]
        cos, sin = self._rotary(x[None], position_ids)
        cos, sin = cos[0][:, None], sin[0][:, None]
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for layer in self._layers:
            x = layer(x, cos, sin, attention)
        return self._head(self._norm(x.index_select(0, rows)))

"""Models built like Llama, computed with few operations: the same numbers as transformers' own code, bit for bit.

transformers' modules spend 230 operations and 13 module calls on each layer of a step. Where it has few tokens, which is what
decoding is, these take as long as the matrix products: a step of 8 sequences of SmolLM2 took 106 ms, and takes 60 ms here (two
cores of a virtual machine). What a model of this family does is written down once; all others run as they came.

The modules, and the parameters in them, stay the model's own: new weights are in place here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from cores.runner.attention import AttentionStep

# Rotary embedding, grouped-query attention, SiLU-gated MLP, RMS norm before each of both; Qwen3 also norms each head.
CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.nn.Parameter
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm | None:
        return None if module is None else cls(module.weight, module.variance_epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return self.weight * h.mul(h.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    scaling: float
    head_dim: int
    input_norm: _Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: Linear
    mlp_norm: _Norm
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def of(cls, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        input_norm, mlp_norm = _Norm.of(module.input_layernorm), _Norm.of(module.post_attention_layernorm)
        assert input_norm is not None
        assert mlp_norm is not None
        return cls(
            index=attention.layer_idx,
            scaling=attention.scaling,
            head_dim=attention.head_dim,
            input_norm=input_norm,
            # `forward`, not the module: a call of it costs as much as a small product.
            query=attention.q_proj.forward,
            key=attention.k_proj.forward,
            value=attention.v_proj.forward,
            query_norm=_Norm.of(getattr(attention, "q_norm", None)),
            key_norm=_Norm.of(getattr(attention, "k_norm", None)),
            output=attention.o_proj.forward,
            mlp_norm=mlp_norm,
            gate=mlp.gate_proj.forward,
            up=mlp.up_proj.forward,
            down=mlp.down_proj.forward,
        )

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """`x` [T, hidden]; `cos` and `sin` [T, 1, head_dim], `sin` with the sign that its half needs."""
        h = self.input_norm(x)
        q = self.query(h).view(len(h), -1, self.head_dim)
        k = self.key(h).view(len(h), -1, self.head_dim)
        v = self.value(h).view(len(h), -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        found = step.attend(self.index, q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], self.scaling)
        x = x + self.output(found.view(len(h), -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h), inplace=True).mul_(self.up(h)))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x.mul(cos).add_(torch.cat((second, first), dim=-1).mul_(sin))


class LeanDecoder:
    """In place of the model it is made of."""

    def __init__(self, model: Any) -> None:
        self._embed = model.model.embed_tokens
        self._rotary = model.model.rotary_emb
        self._layers = [_Layer.of(layer) for layer in model.model.layers]
        norm = _Norm.of(model.model.norm)
        assert norm is not None
        self._norm = norm
        self._head: Linear = model.lm_head.forward

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

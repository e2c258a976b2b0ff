"""Linear layers on a CPU in the form in which they compute: with weights in oneDNN's layout.

With a plain matrix oneDNN brings the weights into its layout at every call, which for few tokens is most of the work. Done once
at load, the matrix products of a step of 1 to 96 tokens take 0.5 to 0.7 of the time (SmolLM2, bfloat16, one core). What follows
a product (an activation, a sum with another tensor) oneDNN does with it, before the result is rounded.

The plain matrix is given up, so the weights exist once: the parameter keeps its name and type but is empty. Whoever replaces
weights gives the parameters their new ones and calls `repack_layers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

Compute = Callable[[torch.Tensor], torch.Tensor]


class Packed(nn.Module):
    """Keeps something that it makes of parameters."""

    def pack(self) -> None:
        """The parameters have other numbers."""
        raise NotImplementedError

    def drop(self) -> None:
        """Frees it. The layer cannot compute until it is packed again."""
        raise NotImplementedError


class PackedLinear(nn.Linear, Packed):
    """Computes with its packed weights if it has some, else as `nn.Linear`."""

    def __init__(self, linear: nn.Linear, *, keeps_weight: bool) -> None:
        """Takes over the parameters of `linear`. `keeps_weight`: another module reads them too."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._keeps_weight = keeps_weight
        self._packed: torch.Tensor | None = None
        self.is_joined = False

    def pack(self) -> None:
        if self.is_joined:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, None)
        if not self._keeps_weight:
            self.weight.data = self.weight.data.new_empty(0)

    def drop(self) -> None:
        self._packed = None

    def give_up_weight(self) -> torch.Tensor:
        """The plain matrix, for a `JoinedLinear` that computes in this layer's place from now on."""
        assert self._packed is not None, "not packed"
        weight = self._packed.to_dense()
        self._packed, self.is_joined = None, True
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return super().forward(input)
        return self._with_unary(input, "none")

    def silu(self, input: torch.Tensor) -> torch.Tensor:
        """SiLU of the product, before it is rounded."""
        return self._with_unary(input, "swish")

    def times(self, input: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self._with_binary(input, factor, "mul")

    def plus(self, input: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._with_binary(input, summand, "add")

    def _with_unary(self, input: torch.Tensor, function: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, function, [], "")
        return out

    def _with_binary(self, input: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(input, other, self._packed, self.bias, operation)
        return out


class JoinedLinear(Packed):
    """Layers of one input as one product, their outputs side by side.

    The parameters stay the layers' own and empty. New weights are given to them, and `repack_layers` collects them here.
    """

    _packed: torch.Tensor | None

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self._parts = tuple(parts)  # a tuple, which torch does not register: the model has them already
        for part in parts:
            part.weight.data = part.give_up_weight()
        self.pack()

    def pack(self) -> None:
        weight = torch.cat([part.weight.data for part in self._parts])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        biases = [weight.new_zeros(p.out_features) if p.bias is None else p.bias.data for p in self._parts]
        self._bias = torch.cat(biases) if any(part.bias is not None for part in self._parts) else None
        for part in self._parts:
            part.weight.data = weight.new_empty(0)

    def drop(self) -> None:
        self._packed = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """float32 stays as it is: there the order of sums shows, and exactness is what it is chosen for."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(ops._is_mkldnn_fp16_supported())


def pack_linears(model: nn.Module) -> None:
    """Every linear layer of a model with its weights in place. What is no plain `nn.Linear` stays as it is."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            packed = PackedLinear(module, keeps_weight=uses[id(module.weight)] > 1)
            packed.pack()
            model.set_submodule(name, packed)


def join_linears(owner: nn.Module, name: str, parts: Sequence[nn.Module]) -> Compute:
    """What gives the outputs of several layers of `owner` side by side: as one product if they are packed."""
    packed = [part for part in parts if isinstance(part, PackedLinear)]
    if len(packed) < len(parts):
        return lambda x: torch.cat([part.forward(x) for part in parts], dim=-1)
    joined = JoinedLinear(packed)
    owner.add_module(name, joined)
    return joined.forward


def repack_layers(model: nn.Module) -> None:
    """After the parameters have been given other weights. Nothing to do where nothing was packed."""
    for module in model.modules():
        if isinstance(module, Packed):
            module.pack()


def drop_packed_layers(model: nn.Module) -> None:
    """Frees what they keep. They cannot compute until their parameters have weights again and are repacked."""
    for module in model.modules():
        if isinstance(module, Packed):
            module.drop()

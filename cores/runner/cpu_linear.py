"""Linear layers on a CPU, with their weights in the layout that oneDNN computes in.

With a plain matrix oneDNN brings the weights into that layout at every call, which for few tokens is most of the work. Done
once at load, the matrix products of a step of 1 to 96 tokens take 0.5 to 0.7 of the time (SmolLM2, bfloat16, one core).

The plain matrix is given up, so the weights exist once: `PackedLinear.weight` keeps its name and type but is empty. Whoever
replaces weights gives the parameters their new ones and calls `repack_linears`.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn


class PackedLinear(nn.Linear):
    """Computes with its packed weights if it has some, else as `nn.Linear`."""

    def __init__(self, linear: nn.Linear, *, keeps_weight: bool) -> None:
        """Takes over the parameters of `linear`. `keeps_weight`: another module reads them too."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._keeps_weight = keeps_weight
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, None)
        if not self._keeps_weight:
            self.weight.data = self.weight.data.new_empty(0)

    def drop(self) -> None:
        self._packed = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return super().forward(input)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
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


def repack_linears(model: nn.Module) -> None:
    """After the parameters have been given other weights. Nothing to do where nothing was packed."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.pack()


def drop_packed_weights(model: nn.Module) -> None:
    """Frees them. The layers cannot compute until their parameters have weights again and are repacked."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.drop()

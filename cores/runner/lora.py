"""LoRA adapters on a loaded model: many in one batch, each token with its own.

Theory of operation
-------------------
Every linear layer gets a forward hook and two matrices that hold its part of all resident adapters side by side: `a`
[inputs, slots × rank] and `b` [slots × rank, outputs]. A batch is one ragged row of tokens, cut into segments. A long run of
tokens of one adapter, a prompt mostly, is a segment that uses that slot's part of `a` and `b` alone. What lies between, decodes
mostly, is a segment of mixed adapters: it is multiplied with the parts of all its slots at once, and what is not a token's own
is set to 0 in the middle, where it is small:

    out[tokens] += mask(x[tokens] @ a[slots]) @ b[slots]

Three calls per layer, however many adapters. On one CPU core, for 32 decodes, 4 adapters of rank 16 and SmolLM2's layers, that
is 12.7 ms a step; a loop over the adapters with gathered tokens takes 16.5 ms, gathered weights and `bmm` take 76. Gathered
weights cost memory traffic and small calls their overhead; the arithmetic for other adapters' columns costs less.

A hook leaves the model as it is: names and weights of its modules stay what everybody else knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cores.lora import LoraSlots
from cores.runner.interface import SchedulerOutput
from cores.runner.lora_adapter import LoraAdapter, LoraTarget, LoraWeights, read_adapter

# Tokens of one adapter in a row from which on they are worth a segment of their own.
MIN_RUN = 64

Run = tuple[int | None, int]  # slot (None: no adapter), number of tokens


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Tokens from `start` on, with the slot of each."""

    start: int
    slots: list[int | None]

    @property
    def used(self) -> set[int]:
        return {slot for slot in self.slots if slot is not None}


def cut_row(runs: Iterable[Run]) -> list[RowSegment]:
    """Segments of a row of tokens. Long runs stand alone, short ones between them together; none without an adapter."""
    segments: list[RowSegment] = []
    mixed: RowSegment | None = None
    start = 0
    for slot, length in _joined(runs):
        if length >= MIN_RUN:
            mixed = None
            segments.append(RowSegment(start, [slot] * length))
        else:
            if mixed is None:
                mixed = RowSegment(start, [])
                segments.append(mixed)
            mixed.slots.extend([slot] * length)
        start += length
    return [segment for segment in segments if segment.used]


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Neighbours of one slot as one run."""
    last, total = None, 0
    for slot, length in runs:
        if slot != last:
            if total:
                yield last, total
            last, total = slot, 0
        total += length
    if total:
        yield last, total


@dataclass(frozen=True, slots=True)
class _Segment:
    """A `RowSegment` for the layers."""

    rows: slice
    columns: slice  # of what lies between `a` and `b`
    slots: int  # bit i: slot i is used
    is_long: bool
    foreign: torch.Tensor | None  # [tokens, columns] bool: not of the token's own adapter. None: there is one adapter for all


class _Layer:
    """One linear layer's part of all resident adapters."""

    def __init__(self, module: torch.nn.Linear, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_inputs = module.in_features
        self.num_outputs = module.out_features
        self._rank = rank
        self._slots = 0  # bit i: the adapter in slot i changes this layer
        # All of it now: memory that an adapter needed later, the KV cache would have taken.
        self._a = torch.zeros(self.num_inputs, num_slots * rank, dtype=dtype, device=device)
        self._b = torch.zeros(num_slots * rank, self.num_outputs, dtype=dtype, device=device)

    def put(self, slot: int, weights: LoraWeights | None) -> None:
        """The slot's new adapter; None: it leaves this layer alone."""
        first, bit = slot * self._rank, 1 << slot
        if weights is None and not self._slots & bit:
            return
        self._a[:, first : first + self._rank] = 0
        self._b[first : first + self._rank] = 0
        self._slots &= ~bit
        if weights is not None:
            self._a[:, first : first + len(weights.a)] = weights.a.T
            self._b[first : first + len(weights.a)] = weights.b.T
            self._slots |= bit

    def add_to(self, out: torch.Tensor, x: torch.Tensor, segments: list[_Segment]) -> None:
        """`out` [tokens, outputs] is changed in place; `x` [tokens, inputs]."""
        for segment in segments:
            if self._slots & segment.slots:
                dtype = x.dtype if segment.is_long else self._a.dtype
                inner = x[segment.rows].to(dtype) @ self._a[:, segment.columns].to(dtype)
                if segment.foreign is not None:
                    inner.masked_fill_(segment.foreign, 0)
                b = self._b[segment.columns].to(dtype)
                if dtype == out.dtype:
                    out[segment.rows].addmm_(inner, b)
                else:
                    out[segment.rows] += inner @ b


class LoraModel:
    """The adapters of one model: all of them in host memory, the most recently used ones in the layers."""

    def __init__(self, model: Any, *, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.adapters: dict[str, LoraAdapter] = {}  # by id
        self.slots = LoraSlots(max_loras)
        self._max_rank = max_rank
        # A small matrix product in bfloat16 takes 30 µs on a CPU, most of it overhead of oneDNN; the same in float32 takes 2 to
        # 20. So weights are kept in float32 there, and long segments, which are faster in bfloat16, convert what they use.
        self._dtype = torch.float32 if device.type == "cpu" and dtype is torch.bfloat16 else dtype
        self._device = device
        self._modules = {name: module for name, module in model.named_modules() if _is_target(model, name, module)}
        self._layers = {
            name: _Layer(module, max_loras, max_rank, self._dtype, device) for name, module in self._modules.items()
        }
        self._segments: list[_Segment] = []  # of the step under way
        self._num_tokens = 0

    # --- which there are ------------------------------------------------------------------------------------------------

    def load(self, path: str) -> str:
        """Raises `LoraError`."""
        layers = {name: (layer.num_inputs, layer.num_outputs) for name, layer in self._layers.items()}
        adapter = read_adapter(path, LoraTarget(layers, self._max_rank, self._dtype))
        self.adapters.setdefault(adapter.id, adapter)
        return adapter.id

    def drop(self, lora_id: str) -> None:
        del self.adapters[lora_id]
        self.slots.release(lora_id)

    # --- one step -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def applied(self, batch: SchedulerOutput) -> Iterator[None]:
        """While it is open the model's layers apply the adapters of the batch's requests to the batch's tokens."""
        self._begin(batch)
        try:
            yield
        finally:
            self._segments = []

    def _begin(self, batch: SchedulerOutput) -> None:
        lora_ids = dict.fromkeys(s.request.lora_id for s in batch.scheduled if s.request.lora_id is not None)
        if not lora_ids:
            return
        for slot, lora_id in self.slots.assign(lora_ids):
            for name, layer in self._layers.items():
                layer.put(slot, self.adapters[lora_id].weights.get(name))
        slot_of = {None: None} | {lora_id: self.slots.slot_of(lora_id) for lora_id in lora_ids}
        row = cut_row((slot_of[s.request.lora_id], s.num_tokens) for s in batch.scheduled)
        self._segments = [self._make_segment(segment) for segment in row]
        self._num_tokens = batch.num_tokens

    def _make_segment(self, segment: RowSegment) -> _Segment:
        used, rank = segment.used, self._max_rank
        first, last = min(used), max(used)
        foreign = None
        if first != last or None in segment.slots:
            slots = torch.tensor([-1 if slot is None else slot for slot in segment.slots])[:, None]
            columns = torch.arange(first, last + 1).repeat_interleave(rank)[None]
            foreign = (slots != columns).to(self._device)
        return _Segment(
            rows=slice(segment.start, segment.start + len(segment.slots)),
            columns=slice(first * rank, (last + 1) * rank),
            slots=sum(1 << slot for slot in used),
            is_long=len(segment.slots) >= MIN_RUN,
            foreign=foreign,
        )

    # --- the model ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """To be open during one step of the model. From then on adapters can change those layers that were called in it: a
        layer whose weights the model uses in another way would silently ignore its adapters."""
        called: set[str] = set()
        hooks = [m.register_forward_hook(lambda *_, name=name: called.add(name)) for name, m in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._layers = {name: layer for name, layer in self._layers.items() if name in called}
        for name, layer in self._layers.items():
            self._hook(self._modules[name], layer)

    def _hook(self, module: torch.nn.Module, layer: _Layer) -> None:
        def apply(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self._segments:
                x = inputs[0].reshape(-1, layer.num_inputs)
                assert len(x) == self._num_tokens, f"{len(x)} tokens in a layer, {self._num_tokens} in the batch"
                layer.add_to(output.view(-1, layer.num_outputs), x, self._segments)

        module.register_forward_hook(apply)


def _is_target(model: Any, name: str, module: torch.nn.Module) -> bool:
    """A linear layer that sees every token of a batch in its order: not the last one, and no expert."""
    return (
        isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings() and "experts" not in name.split(".")
    )

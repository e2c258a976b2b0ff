"""Reads a LoRA adapter as PEFT saves it, and says exactly what cannot be served of one. Knows no slots and no requests."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from cores.lora import LoraError, LoraNotFoundError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What is added to one layer's output of x: (x @ a.T) @ b.T."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank], the scaling in it


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    id: str
    weights: dict[str, LoraWeights]  # by the name of the layer


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """What adapters must fit."""

    layers: Mapping[str, tuple[int, int]]  # (inputs, outputs) of each linear layer, by name
    max_rank: int
    dtype: torch.dtype


def read_adapter(path: str, target: LoraTarget) -> LoraAdapter:
    """Raises `LoraError`."""
    directory = Path(path)
    if not directory.is_dir():
        raise LoraNotFoundError(f"adapter directory {path!r} does not exist")
    # Read once: what is hashed is what is served, whatever happens to the files meanwhile.
    config_bytes, weights_bytes = _read(directory, CONFIG_FILE), _read(directory, WEIGHTS_FILE)
    lora_id = hashlib.blake2b(
        len(config_bytes).to_bytes(8, "little") + config_bytes + weights_bytes, digest_size=16
    ).hexdigest()
    try:
        config = _parse_config(config_bytes)
        return LoraAdapter(lora_id, _read_weights(weights_bytes, config, target))
    except LoraError as error:
        raise LoraError(f"adapter {path!r} cannot be served: {error}") from None


def _read(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except FileNotFoundError:
        hint = ""
        if name == WEIGHTS_FILE and (directory / "adapter_model.bin").exists():
            hint = "; adapter_model.bin is a pickle, which is never loaded: save the adapter as safetensors"
        raise LoraNotFoundError(f"adapter directory {str(directory)!r} has no {name}{hint}") from None
    except OSError as error:
        raise LoraError(f"cannot read {str(directory / name)!r}: {error.strerror}") from None


# --- adapter_config.json --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Config:
    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: dict[str, int]  # by a pattern that ends a layer's name
    alpha_pattern: dict[str, float]

    def rank_of(self, layer: str) -> int:
        return int(_by_pattern(self.rank_pattern, layer, self.rank))

    def scaling_of(self, layer: str) -> float:
        rank, alpha = self.rank_of(layer), _by_pattern(self.alpha_pattern, layer, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def _by_pattern(patterns: Mapping[str, float], layer: str, default: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


_CHANGES_BASE_WEIGHTS = ("pissa", "olora", "corda", "loftq")

# What an adapter's configuration may ask for that we do not compute.
_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("use_dora", bool, "it is a DoRA adapter"),
    ("modules_to_save", bool, "it replaces whole modules"),
    ("bias", lambda value: value not in (None, "none"), "it trains biases"),
    ("lora_bias", bool, "it has biases of its own"),
    ("trainable_token_indices", bool, "it trains token embeddings"),
    ("target_parameters", bool, "it targets parameters that are no linear layer"),
    ("layer_replication", bool, "it repeats layers"),
    ("alora_invocation_tokens", bool, "it is an activated LoRA"),
    ("use_qalora", bool, "it is a QALoRA adapter"),
    ("init_lora_weights", lambda v: str(v).lower().startswith(_CHANGES_BASE_WEIGHTS), "it needs other weights of the model"),
)


def _parse_config(data: bytes) -> _Config:
    try:
        values = json.loads(data)
    except ValueError as error:
        raise LoraError(f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise LoraError(f"{CONFIG_FILE} must hold a JSON object, got {type(values).__name__}")
    if values.get("peft_type") != "LORA":
        raise LoraError(f"peft_type must be 'LORA', got {values.get('peft_type')!r}")
    for key, asks_for, what in _UNSUPPORTED:
        if asks_for(values.get(key)):
            raise LoraError(f"{what} ({key}: {values[key]!r}), which is not supported")
    return _Config(
        rank=int(_positive(values.get("r"), "r", int)),
        alpha=_positive(values.get("lora_alpha"), "lora_alpha", (int, float)),
        is_rank_stabilized=bool(values.get("use_rslora")),
        rank_pattern={key: int(value) for key, value in _patterns(values, "rank_pattern", int).items()},
        alpha_pattern=_patterns(values, "alpha_pattern", (int, float)),
    )


def _patterns(values: dict[str, Any], name: str, kind: Any) -> dict[str, float]:
    patterns = values.get(name) or {}
    if not isinstance(patterns, dict):
        raise LoraError(f"{name} must hold values by pattern, got {patterns!r}")
    for key in patterns:
        try:
            re.compile(key)
        except re.error as error:
            raise LoraError(f"{name}: {key!r} is not a pattern: {error}") from None
    return {key: _positive(value, f"{name}[{key!r}]", kind) for key, value in patterns.items()}


def _positive(value: Any, name: str, kind: Any) -> float:
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
        raise LoraError(f"{name} must be a positive number, got {value!r}")
    return float(value)


# --- adapter_model.safetensors --------------------------------------------------------------------------------------------

_WEIGHT = re.compile(r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<half>[AB])\.weight$")


def _read_weights(data: bytes, config: _Config, target: LoraTarget) -> dict[str, LoraWeights]:
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise LoraError(f"{WEIGHTS_FILE} is not a safetensors file: {error}") from None
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _WEIGHT.match(name)
        if match is None:
            raise LoraError(f"{WEIGHTS_FILE} has {name!r}, which is not the lora_A or lora_B of a linear layer")
        halves.setdefault(match["layer"], {})[match["half"]] = tensor
    if not halves:
        raise LoraError(f"{WEIGHTS_FILE} is empty")
    return {layer: _weights_of(layer, tensors, config, target) for layer, tensors in sorted(halves.items())}


def _weights_of(layer: str, halves: dict[str, torch.Tensor], config: _Config, target: LoraTarget) -> LoraWeights:
    if layer not in target.layers:
        raise LoraError(f"the model has no layer {layer!r} that adapters can change; {_examples(layer, target.layers)}")
    for half in "AB":
        if half not in halves:
            raise LoraError(f"lora_{half} of {layer} is missing")
    rank, (num_inputs, num_outputs) = config.rank_of(layer), target.layers[layer]
    if rank > target.max_rank:
        raise LoraError(f"its rank {rank} is above the limit of {target.max_rank} (--max-lora-rank)")
    for half, expected in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
        shape = tuple(halves[half].shape)
        if shape != expected:
            raise LoraError(
                f"lora_{half} of {layer} must be {list(expected)}: the layer has {num_inputs} inputs and {num_outputs} outputs,"
                f" and {CONFIG_FILE} says rank {rank}; it is {list(shape)}, perhaps for another model"
            )
    a = halves["A"].to(target.dtype).contiguous()
    b = (halves["B"].float() * config.scaling_of(layer)).to(target.dtype).contiguous()
    if not (a.isfinite().all() and b.isfinite().all()):
        # In a batch every row meets every adapter's weights, times 0 where they are not its own; 0 × infinity is no number.
        raise LoraError(f"the weights of {layer} are not finite in {str(target.dtype).removeprefix('torch.')}")
    return LoraWeights(a, b)


def _examples(layer: str, known: Mapping[str, object]) -> str:
    """Names of the layer's block, if there is such a block; else of any."""
    prefix = layer.rpartition(".")[0] + "."
    near = [name for name in known if name.startswith(prefix)] or list(known)
    return "there are " + ", ".join(near[:8]) + (" …" if len(near) > 8 else "")

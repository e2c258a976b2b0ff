"""The weights of a loaded model as something that can be put away, dropped, brought back and replaced. Knows no KV cache.

The model object stays the same all the time: only where its parameters keep their numbers changes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cores.config import ConfigError
from cores.loader import LoadedModel, check_weights_fit, needed_keys
from cores.runner.packed_layers import drop_packed_layers, repack_layers

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]  # parameters by name, each once however often it is used


class Weights:
    """`directory` is where the model was loaded from."""

    def __init__(self, loaded: LoadedModel, directory: str) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._dtype = loaded.dtype
        self._directory = directory
        self._parameters: dict[str, torch.nn.Parameter] = dict(loaded.model.named_parameters())
        # What the model's own files hold beyond its parameters (old position tables, say) may be in others, too.
        self._known_names = _stored_names(Path(directory))
        self._dropped = False
        self._prepared: tuple[str, Tensors] | None = None

    def offload(self) -> None:
        """To the host's memory. On a CPU they are there already."""
        if self._device.type == "cpu" or self._dropped:
            return
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(CPU)

    def drop(self) -> None:
        """Their memory is free; `restore` reads them again."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
        drop_packed_layers(self._model)
        self._dropped = True

    def restore(self) -> None:
        """Back to where the model computes, from the host or from the directory that they came from last."""
        if self._dropped:
            self._adopt(self._read(self._directory))
            self._dropped = False
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(self._device)  # nothing to do for those that are there

    def prepare(self, directory: str) -> None:
        """Raises `ConfigError` if these are no weights for this model."""
        self._prepared = None
        self._prepared = directory, self._read(directory)

    def commit(self) -> None:
        assert self._prepared is not None, "no weights are prepared"
        directory, tensors = self._prepared
        self._prepared = None
        self._adopt(tensors)
        self._directory = directory
        logger.info("weights from %s are in place", directory)

    def discard(self) -> None:
        self._prepared = None

    def _adopt(self, tensors: Tensors) -> None:
        for name, parameter in self._parameters.items():
            if parameter.device.type == "cpu" or parameter.numel() == 0:
                parameter.data = tensors[name].to(self._device)
            else:
                parameter.data.copy_(tensors[name])  # needs no memory on the device, so it cannot fail halfway
        repack_layers(self._model)

    def _read(self, directory: str) -> Tensors:
        """A whole set on the host. The model's own configuration counts, whatever the directory says."""
        path = Path(directory)
        if not any(path.glob("*.safetensors")):
            raise ConfigError(f"weights directory {directory!r} has no *.safetensors")
        check_weights_fit(path, self._model.config, self._dtype, CPU)
        try:
            model, info = type(self._model).from_pretrained(
                path,
                config=self._model.config,
                generation_config=getattr(self._model, "generation_config", None),
                dtype=self._dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told by name below
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"weights in {directory!r} cannot be read: {error}") from error
        _check_complete(directory, info, self._known_names)
        tensors = {name: parameter.data for name, parameter in model.named_parameters()}
        if tensors.keys() != self._parameters.keys():
            raise ConfigError(f"weights in {directory!r} make a model with other parameters than this engine's")
        return tensors


def _check_complete(directory: str, info: dict[str, Any], known_names: frozenset[str]) -> None:
    """transformers fills what is missing with random numbers and leaves out what is too much, and says so only here."""
    for name, found, wanted in sorted(info["mismatched_keys"], key=str):
        raise ConfigError(
            f"weights in {directory!r} do not fit: {name} has the shape {list(found)}, the model's is {list(wanted)}"
        )
    if missing := needed_keys(info["missing_keys"]):
        raise ConfigError(f"weights in {directory!r} do not fit: {', '.join(missing[:3])} … missing")
    if surplus := sorted(set(info["unexpected_keys"]) - known_names):
        raise ConfigError(f"weights in {directory!r} do not fit: the model has no {', '.join(surplus[:3])} …")


def _stored_names(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)

"""What a request that does not say is sampled with: the model's own generation_config.json, as in vLLM.

Knows no requests: `sampling` of the server puts these values where a field was left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cores.config import ConfigError
from cores.sampling_params import InvalidParameterError, SamplingParams
from gateway.config import GatewayConfig
from gateway.tokenizer import read_json

logger = logging.getLogger(__name__)

SamplingDefaults = Mapping[str, Any]  # by the name in `SamplingParams`

_KINDS: Final[Mapping[str, type]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "max_new_tokens": int,
}  # fmt: skip


def read_sampling_defaults(config: GatewayConfig) -> SamplingDefaults:
    """By the settings and the model's directory. Raises `ConfigError`."""
    source, found = config.server.generation_config, {}
    if source != "vllm":
        file = Path(config.engine.model if source == "auto" else source) / "generation_config.json"
        if source != "auto" and not file.is_file():
            raise ConfigError(f"--generation-config must be auto, vllm or a directory with {file.name}, got {source!r}")
        found = _chosen(read_json(file), f"{file}:")
    if found:
        shown = " ".join(f"{name}={value:g}" for name, value in found.items())
        logger.info(
            "where a request does not say how to sample: %s (generation_config.json; --generation-config vllm: not)", shown
        )
    return found | _chosen(config.server.generation_config_override, "--override-generation-config:")


def _chosen(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        value = document.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or kind(value) != value:
            raise ConfigError(f"{where} {name} must be a {'whole ' * (kind is int)}number, got {value!r}")
        values["max_tokens" if name == "max_new_tokens" else name] = kind(value)
    try:
        SamplingParams(**values).verify()
    except InvalidParameterError as error:
        raise ConfigError(f"{where} {error}") from error
    return values

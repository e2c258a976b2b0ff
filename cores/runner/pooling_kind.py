"""Whether a model directory is one of an embedding model, and how its vectors are made: from the files of sentence-transformers
in it, else as such models usually do. Read without torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cores.config import ConfigError
from cores.runner.model_dir import read_json

# Every token sees all others. Whatever is not here reads from left to right.
ENCODER_TYPES = frozenset({"bert", "camembert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"})
# These leave the first positions to padding: a sequence has so many less than the table has rows.
POSITIONS_FROM_PADDING = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})

How = Literal["mean", "cls", "last"]
_MODES: dict[str, How] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class PoolingKind:
    """`dimensions` are the smaller sizes that the model was trained for."""

    is_encoder: bool
    how: How
    normalize: bool
    size: int
    dimensions: tuple[int, ...] = ()
    max_model_len: int | None = None  # what the makers recommend; None: what the model can


def read_pooling_kind(directory: str, runner: str) -> PoolingKind | None:
    """None: it generates text. `runner` is the setting. Raises `ConfigError` for what we cannot compute."""
    path = Path(directory)
    config = read_json(path / "config.json")
    model_type = config.get("model_type")
    is_encoder = model_type in ENCODER_TYPES
    modules = _read_modules(path)
    if runner == "generate" or (runner == "auto" and not is_encoder and modules is None):
        return None
    how, normalize = _read_recipe(path, modules, "mean" if is_encoder else "last")
    if not is_encoder and how != "last":
        raise ConfigError(
            f"model is not supported: {model_type} with {how} pooling; a model that reads forward pools its last token"
        )
    size = config.get("text_config", config).get("hidden_size") or config.get("dim")
    if not isinstance(size, int):
        raise ConfigError(f"{path / 'config.json'}: hidden_size must be a number, got {size!r}")
    return PoolingKind(is_encoder, how, normalize, size, _dimensions(config, size), _recommended_len(path))


def num_positions(config: dict[str, Any]) -> int | None:
    """Of an encoder: the longest sequence that it has positions for."""
    rows = config.get("max_position_embeddings")
    if rows is None or config.get("model_type") not in POSITIONS_FROM_PADDING:
        return rows
    return int(rows) - int(config.get("pad_token_id") or 0) - 1


def _read_modules(path: Path) -> list[tuple[str, Path]] | None:
    """(type, directory) of each step of a sentence-transformers model, in order; None: it is not one."""
    file = path / "modules.json"
    if not file.is_file():
        return None
    try:
        return [(str(module["type"]).rpartition(".")[2], path / module["path"]) for module in json.loads(file.read_bytes())]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be used: {error!r}") from None


def _read_recipe(path: Path, modules: list[tuple[str, Path]] | None, usual: How) -> tuple[How, bool]:
    if modules is None:
        return usual, True
    names = [name for name, _ in modules]
    if unknown := [name for name in names if name not in ("Transformer", "Pooling", "Normalize")]:
        raise ConfigError(f"model is not supported: {path / 'modules.json'} asks for {unknown[0]}")
    how = usual
    for name, directory in modules:
        if name == "Pooling":
            how = _read_mode(directory / "config.json")
    return how, "Normalize" in names


def _read_mode(file: Path) -> How:
    config = read_json(file)
    asked = [key for key, value in config.items() if key.startswith("pooling_mode") and value is True]
    if len(asked) != 1 or asked[0] not in _MODES:
        raise ConfigError(
            f"model is not supported: {file} asks for {', '.join(asked) or 'no pooling'}; known: {', '.join(_MODES)}"
        )
    return _MODES[asked[0]]


def _dimensions(config: dict[str, Any], size: int) -> tuple[int, ...]:
    """Of Matryoshka models, whose vectors' first part is a vector, too."""
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(sorted(int(n) for n in listed if int(n) <= size))
    return tuple(range(1, size + 1)) if config.get("is_matryoshka") else ()


def _recommended_len(path: Path) -> int | None:
    file = path / "sentence_bert_config.json"
    value = read_json(file).get("max_seq_length") if file.is_file() else None
    return value if isinstance(value, int) and value > 0 else None

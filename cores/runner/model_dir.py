"""What a Hugging Face style directory says about a model, read without transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cores.config import ConfigError


@dataclass(frozen=True, slots=True)
class ModelDir:
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    printable_token_ids: list[int]  # one token each of printable ASCII text; no added or special tokens, no EOS


def read_model_dir(path: str) -> ModelDir:
    """Raises `ConfigError` that names the file that is missing or wrong."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"model directory {path!r} does not exist")
    config = read_json(directory / "config.json")
    text_config = config.get("text_config", config)  # multimodal models keep the language model's part there
    eos_token_ids = read_eos_token_ids(directory, config | text_config)
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    return ModelDir(
        vocab_size=_positive_int(text_config, "vocab_size", directory),
        max_model_len=_positive_int(text_config, "max_position_embeddings", directory),
        eos_token_ids=eos_token_ids,
        printable_token_ids=_printable_token_ids(tokenizer, frozenset(eos_token_ids), directory),
    )


def _printable_token_ids(tokenizer: Tokenizer, eos_token_ids: frozenset[int], directory: Path) -> list[int]:
    excluded = eos_token_ids | tokenizer.get_added_tokens_decoder().keys()
    token_ids = []
    for token_id in sorted(tokenizer.get_vocab(with_added_tokens=False).values()):
        text = "" if token_id in excluded else tokenizer.decode([token_id])
        if text and text.isascii() and text.isprintable():
            token_ids.append(token_id)
    if not token_ids:
        raise ConfigError(f"{directory / 'tokenizer.json'} has no token of printable ASCII text")
    return token_ids


def read_eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json has the last word, as in transformers: chat models end turns with more than one token."""
    generation_config = directory / "generation_config.json"
    value = read_json(generation_config).get("eos_token_id") if generation_config.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _positive_int(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{directory / 'config.json'}: {key} must be a positive number, got {value!r}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: no such file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception for whatever is wrong in the file
        raise ConfigError(f"{path} is not a tokenizer: {error}") from None

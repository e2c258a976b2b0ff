"""What the files of a model directory say about its vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cores.config import ConfigError
from cores.runner.pooling_kind import PoolingKind, num_positions, read_pooling_kind

BERT = {"model_type": "bert", "hidden_size": 384}
QWEN = {"model_type": "qwen3", "hidden_size": 1024, "architectures": ["Qwen3ForCausalLM"]}


def write(path: Path, config: dict[str, Any], modules: list[str] | None = None, **pooling: bool) -> str:
    (path / "config.json").write_text(json.dumps(config))
    if modules is not None:
        steps = [{"type": f"sentence_transformers.models.{name}", "path": f"{i}_{name}"} for i, name in enumerate(modules)]
        (path / "modules.json").write_text(json.dumps(steps))
        for step in steps:
            (path / step["path"]).mkdir()
            (path / step["path"] / "config.json").write_text(json.dumps({"word_embedding_dimension": 384} | pooling))
    return str(path)


def test_a_causal_model_generates_unless_its_files_or_the_setting_say_otherwise(tmp_path: Path) -> None:
    directory = write(tmp_path, QWEN)
    assert read_pooling_kind(directory, "auto") is None
    assert read_pooling_kind(directory, "generate") is None
    assert read_pooling_kind(directory, "pooling") == PoolingKind(False, "last", True, 1024)
    write(tmp_path, QWEN, ["Transformer", "Pooling", "Normalize"], pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)
    assert read_pooling_kind(directory, "auto") == PoolingKind(False, "last", True, 1024)
    assert read_pooling_kind(directory, "generate") is None


def test_an_encoder_embeds_by_the_mean_unless_its_files_say_otherwise(tmp_path: Path) -> None:
    directory = write(tmp_path, BERT)
    assert read_pooling_kind(directory, "auto") == PoolingKind(True, "mean", True, 384)
    write(tmp_path, BERT, ["Transformer", "Pooling"], pooling_mode_cls_token=True)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    assert read_pooling_kind(directory, "auto") == PoolingKind(True, "cls", False, 384, max_model_len=256)


@pytest.mark.parametrize(
    ("config", "modules", "pooling", "words"),
    [
        (BERT, ["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "asks for Dense"),
        (BERT, ["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "asks for pooling_mode_max_tokens"),
        (BERT, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "asks for"),
        (BERT, ["Transformer", "Pooling"], {}, "asks for no pooling"),
        (QWEN, ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, "qwen3 with mean pooling"),
        ({"model_type": "bert"}, None, {}, "hidden_size must be a number, got None"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], modules: list[str] | None, pooling: dict[str, bool], words: str
) -> None:
    directory = write(tmp_path, config, modules, **pooling)
    with pytest.raises(ConfigError, match=words):
        read_pooling_kind(directory, "auto")


def test_broken_modules_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path, BERT)
    (tmp_path / "modules.json").write_text("[{}]")
    with pytest.raises(ConfigError, match=r"modules\.json cannot be used: KeyError"):
        read_pooling_kind(directory, "auto")


@pytest.mark.parametrize(
    ("more", "dimensions"),
    [
        ({}, ()),
        ({"matryoshka_dimensions": [768, 64, 256]}, (64, 256)),
        ({"is_matryoshka": True}, tuple(range(1, 385))),
    ],
)
def test_matryoshka_models_have_smaller_sizes(tmp_path: Path, more: dict[str, Any], dimensions: tuple[int, ...]) -> None:
    kind = read_pooling_kind(write(tmp_path, BERT | more), "auto")
    assert kind is not None
    assert kind.dimensions == dimensions


def test_roberta_keeps_its_first_positions_for_padding() -> None:
    assert num_positions({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}) == 512
    assert num_positions({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}) == 512
    assert num_positions({"model_type": "bert"}) is None

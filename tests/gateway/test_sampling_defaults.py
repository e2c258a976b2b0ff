"""What generation_config.json and its flags say of requests that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError, EngineConfig, GatewayConfig, ServerConfig
from gateway.sampling_defaults import read_sampling_defaults


def read(model: Path, **server: Any) -> dict[str, Any]:
    return dict(read_sampling_defaults(GatewayConfig(engine=EngineConfig(model=str(model)), server=ServerConfig(**server))))


def write(directory: Path, **values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_the_models_own_file_is_used_unless_told_otherwise(tmp_path: Path) -> None:
    model = write(tmp_path / "model", temperature=1, top_p=0.8, top_k=20, do_sample=True, eos_token_id=2, min_p=None)
    other = write(tmp_path / "other", max_new_tokens=64)
    assert read(model) == {"temperature": 1.0, "top_p": 0.8, "top_k": 20}
    assert read(model, generation_config="vllm") == {}
    assert read(model, generation_config=str(other)) == {"max_tokens": 64}
    assert read(tmp_path) == {}


def test_single_values_beat_the_file(tmp_path: Path) -> None:
    model, override = write(tmp_path / "model", temperature=0.5, top_k=20), '{"temperature": 0}'
    assert read(model, override_generation_config=override) == {"temperature": 0.0, "top_k": 20}
    assert read(model, generation_config="vllm", override_generation_config=override) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_k": float("inf")}, "top_k must be a whole number, got inf"),  # `Infinity`, as Python's JSON has it
        ({"top_p": 2}, "top_p must be .* got 2.0"),
    ],
)
def test_a_bad_value_ends_the_start(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        read(write(tmp_path / "model", **values))
    with pytest.raises(ConfigError, match=f"--override-generation-config: {message}"):
        read(tmp_path, override_generation_config=json.dumps(values))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be auto, vllm or a directory with"):
        read(tmp_path, generation_config=str(tmp_path))


@pytest.mark.parametrize("name", ["override_generation_config", "default_chat_template_kwargs"])
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_what_is_no_json_object_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} takes a JSON object"):
        ServerConfig(**{name: text})

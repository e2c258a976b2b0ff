"""Sleep, wake-up, new weights and profiles with a real model: it computes what it did before, or what a fresh engine would."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cores.messages import UtilityCall, UtilityResult
from cores.runner.model_runner import TorchModelRunner
from cores.runner.testing import make_tiny_llama
from cores.testing import make_request
from tests.cores.runner.torch_engine import Engine

PROMPT = [3 + i * 29 % 470 for i in range(40)]


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes, other numbers."""
    return make_tiny_llama(tmp_path_factory.mktemp("other-llama"), seed=1)


def call(engine: Engine, method: str, *args: Any) -> UtilityResult:
    result = engine.core.call_utility(UtilityCall(1, 1, method, args))
    while result is None:
        engine.core.step()
        for _, late in engine.core.take_late_results():
            result = late
    return result


def succeed(engine: Engine, method: str, *args: Any) -> Any:
    result = call(engine, method, *args)
    assert result.error is None
    return result.value


def tokens(engine: Engine, handle: int = 1) -> list[int]:
    return engine.run([make_request(handle, PROMPT, max_tokens=12)])[handle]


def step(engine: Engine) -> list[int]:
    return [token for outputs in engine.core.step().values() for token in outputs.token_ids]


def num_weight_bytes(engine: Engine) -> int:
    runner = engine.core._runner
    assert isinstance(runner, TorchModelRunner)
    return sum(p.untyped_storage().nbytes() for p in runner._loaded_parts.loaded.model.parameters())


@pytest.mark.parametrize("level", [1, 2])
def test_a_woken_engine_computes_what_it_did(make_engine: Callable[..., Engine], level: int) -> None:
    engine = make_engine()
    before, num_bytes = tokens(engine), num_weight_bytes(engine)
    succeed(engine, "sleep", level)
    assert engine.core._runner._loaded_parts.cache is None  # type: ignore[attr-defined]
    assert num_weight_bytes(engine) == (num_bytes if level == 1 else 0)
    succeed(engine, "wake_up", ["weights"])
    assert num_weight_bytes(engine) == num_bytes
    succeed(engine, "wake_up", ["kv_cache"])
    assert tokens(engine) == before


def test_a_request_kept_over_the_deepest_sleep_goes_on_as_if_nothing_had_been(make_engine: Callable[..., Engine]) -> None:
    expected = tokens(make_engine())
    engine = make_engine()
    engine.core.add_request(0, make_request(1, PROMPT, max_tokens=12))
    first = [token for _ in range(5) for token in step(engine)]
    succeed(engine, "sleep", 2, "keep")
    assert not engine.core.has_work
    succeed(engine, "wake_up")
    rest: list[int] = []
    while engine.core.has_work:
        rest += step(engine)
    assert (len(first), first + rest) == (5, expected)


def test_new_weights_are_those_of_a_fresh_engine(make_engine: Callable[..., Engine], other_llama: Path) -> None:
    engine = make_engine()
    old, new = tokens(engine), tokens(make_engine(other_llama))
    assert old != new
    assert succeed(engine, "update_weights", str(other_llama), 3) == 3
    assert tokens(engine) == new
    assert engine.core.stats().prefix_cache_hits == 0  # what the old weights had computed is not found
    succeed(engine, "sleep", 2)
    succeed(engine, "wake_up")
    assert tokens(engine) == new  # dropped weights come back from where they came from last


def test_weights_can_come_without_a_configuration_and_while_the_cache_sleeps(
    make_engine: Callable[..., Engine], other_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(other_llama / "model.safetensors")
    engine = make_engine()
    succeed(engine, "sleep", 2)
    succeed(engine, "wake_up", ["weights"])
    succeed(engine, "update_weights", str(tmp_path), 1)
    succeed(engine, "wake_up", ["kv_cache"])
    assert tokens(engine) == tokens(make_engine(other_llama))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 32, "head_dim": 8}, r"embed_tokens\.weight has the shape \[484, 32\], the model's is \[484, 64\]"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..* missing"),
        ({"num_hidden_layers": 3}, r"the model has no model\.layers\.2\."),
    ],
    ids=["narrower", "too few layers", "too many layers"],
)
def test_weights_of_another_shape_are_refused_and_the_old_ones_serve(
    make_engine: Callable[..., Engine], tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    engine = make_engine()
    before = tokens(engine)
    result = call(engine, "update_weights", str(make_tiny_llama(tmp_path, **config)), 1)
    assert result.is_refusal
    with pytest.raises(ValueError, match=words):
        raise ValueError(result.error)
    assert tokens(engine) == before
    assert succeed(engine, "get_weight_version") == 0


def test_what_cannot_be_read_is_refused_and_the_old_ones_serve(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    before = tokens(engine)
    assert "has no *.safetensors" in str(call(engine, "update_weights", str(tmp_path / "nowhere"), 1).error)
    (tmp_path / "model.safetensors").write_bytes(b"torn" * 100)
    result = call(engine, "update_weights", str(tmp_path), 1)
    assert result.is_refusal
    assert "cannot be read" in str(result.error)
    assert tokens(engine) == before


def test_a_profile_holds_the_models_operations(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine(profile_dir=str(tmp_path))
    succeed(engine, "start_profile")
    tokens(engine)
    path = Path(succeed(engine, "stop_profile"))
    assert path.name == "rank-0-1-1.pt.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"aten::linear", "aten::scaled_dot_product_attention"} <= names

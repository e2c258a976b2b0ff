"""A real engine core process that runs a real model, over real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cores.messages import FinishReason
from cores.runner.testing import make_random_lora, make_tiny_llama
from cores.testing import make_request, make_tiny_model_dir
from tests.cores.runner.torch_engine import Engine
from tests.integration.engine_core_harness import EngineHarness

SETTINGS = {"engine": "torch", "device": "cpu", "dtype": "float32", "num_kv_blocks": 128, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: an ipc address has room for about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="core-") as path:
        yield Path(path)


@pytest.fixture
def engine(directory: Path, model: Path) -> Iterator[EngineHarness]:
    harness = EngineHarness(directory, model)
    yield harness
    harness.close()


def test_tokens_from_the_process_are_those_of_the_engine_in_hand(engine: EngineHarness, model: Path) -> None:
    requests = [make_request(i, 9 * i, temperature=i % 2, max_tokens=12, logprobs=1) for i in range(1, 9)]
    expected = Engine(model, max_num_batched_tokens=64).run(requests)

    ready = engine.start_ready(**SETTINGS)
    assert (ready.device, ready.vocab_size, ready.max_model_len, ready.num_kv_blocks) == ("cpu", 484, 2048, 128)
    front_end = engine.front_end
    for request in requests:
        front_end.add(request)
    front_end.receive_until(lambda: len(front_end.finished) == len(requests))
    assert front_end.tokens == expected
    assert {finished.reason for finished in front_end.finished.values()} == {FinishReason.LENGTH}


def test_adapters_of_the_command_line_are_served_from_the_start(engine: EngineHarness, model: Path, tmp_path: Path) -> None:
    paths = {name: str(make_random_lora(tmp_path / name, model, seed)) for seed, name in enumerate(("a", "b"))}
    settings = SETTINGS | {"enable_lora": True}
    in_hand = Engine(model, max_num_batched_tokens=64, enable_lora=True)
    for name, path in paths.items():
        in_hand.core.loras.add_lora(name, path)
    names = [None, "a", "b"]
    requests = [make_request(i, 9 * i, temperature=i % 2, max_tokens=12, lora_name=names[i % 3]) for i in range(1, 9)]
    expected = in_hand.run(requests)

    engine.start_ready(**settings, lora_modules=tuple(f"{name}={path}" for name, path in paths.items()))
    front_end = engine.front_end
    for request in requests:
        front_end.add(request)
    front_end.receive_until(lambda: len(front_end.finished) == len(requests))
    assert front_end.tokens == expected


def test_a_directory_without_weights_is_the_cause_in_the_last_words(directory: Path, tmp_path: Path) -> None:
    harness = EngineHarness(directory, make_tiny_model_dir(tmp_path))
    try:
        harness.start(**SETTINGS)
        assert harness.wait_exit() != 0
        assert "has no weights" in harness.stderr()
    finally:
        harness.close()

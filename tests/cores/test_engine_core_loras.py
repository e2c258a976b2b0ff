"""Adapters of an engine core with the simulated runner: by utility call, in requests, and between steps."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cores.config import ConfigError, EngineConfig, SimulatedConfig
from cores.engine_core import EngineCore
from cores.messages import Finished, FinishReason, RankId, UtilityCall
from cores.runner.simulated import SimulatedModelRunner
from cores.testing import ManualClock, make_request, make_tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Two adapters."""
    for name in ("sql", "chat"):
        (tmp_path / name).mkdir()
    return {name: str(tmp_path / name) for name in ("sql", "chat")}


class Engine:
    def __init__(self, model: Path, rank: int = 0, **settings: Any) -> None:
        config = EngineConfig(
            model=str(model),
            engine="simulated",
            simulated=SimulatedConfig(),
            **{"enable_lora": True, "block_size": 4, "num_kv_blocks": 64} | settings,
        )
        rank_id, clock = RankId(rank, 1), ManualClock()
        runner = SimulatedModelRunner(config, rank_id, sleep=clock.sleep, clock=clock)
        self.core = EngineCore(rank_id, config, runner.load(), runner, clock)

    def call(self, method: str, *args: Any) -> Any:
        result = self.core.call_utility(UtilityCall(1, 1, method, args))
        assert result.error is None, result.error
        return result.value

    def error(self, method: str, *args: Any) -> str:
        error = self.core.call_utility(UtilityCall(1, 1, method, args)).error
        assert error is not None
        return error

    def add(self, handle: int, **request: Any) -> None:
        self.core.add_request(0, make_request(handle, prompt=[5] * 9, **request))

    def drain(self) -> dict[int, tuple[list[int], Finished]]:
        """Tokens and end of each request, by handle."""
        tokens: defaultdict[int, list[int]] = defaultdict(list)
        ends: dict[int, Finished] = {}
        while self.core.has_work:
            (outputs,) = self.core.step().values()
            counts, position = outputs.counts or [1] * len(outputs.handles), 0
            for row, (handle, count) in enumerate(zip(outputs.handles, counts, strict=True)):
                tokens[handle] += outputs.token_ids[position : position + count]
                position += count
                if row in outputs.finished:
                    ends[handle] = outputs.finished[row]
            self.core.check_invariants()
        return {handle: (tokens[handle], end) for handle, end in ends.items()}

    def run(self, **request: Any) -> tuple[list[int], Finished]:
        self.add(1, **request)
        return self.drain()[1]


def test_a_request_gets_the_tokens_of_its_adapter_on_every_rank(model: Path, paths: dict[str, str]) -> None:
    engines = [Engine(model, rank) for rank in range(2)]
    for engine in engines:
        added = [engine.call("add_lora", name, path) for name, path in paths.items()]
        assert [(lora["name"], lora["path"]) for lora in added] == list(paths.items())
        assert engine.call("list_loras") == added
    outputs = {name: engines[0].run(lora_name=name)[0] for name in (None, "sql", "chat")}
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3
    for name, tokens in outputs.items():
        assert engines[1].run(lora_name=name)[0] == tokens


def test_a_request_for_an_adapter_that_is_not_there_fails_alone(model: Path, paths: dict[str, str]) -> None:
    engine = Engine(model)
    engine.call("add_lora", "sql", paths["sql"])
    tokens, end = engine.run(lora_name="chat")
    assert (tokens, end.reason) == ([], FinishReason.ERROR)
    assert end.error == "adapter 'chat' is not loaded on this rank; loaded: 'sql'"
    assert engine.run(lora_name="sql")[1].reason is FinishReason.LENGTH
    assert engine.run(lora_name="sql", lora_id="0" * 32)[1].reason is FinishReason.ERROR


def test_a_request_means_the_adapter_that_had_the_name_when_it_was_sent(model: Path, paths: dict[str, str]) -> None:
    engine = Engine(model)
    old = engine.call("add_lora", "mine", paths["sql"])["id"]
    expected = engine.run(lora_name="mine", lora_id=old)[0]
    engine.add(1, lora_name="mine", lora_id=old)
    new = engine.call("add_lora", "mine", paths["chat"])["id"]
    assert new != old
    engine.add(2, lora_name="mine", lora_id=old)  # its front end did not know yet
    assert [tokens for tokens, _ in engine.drain().values()] == [expected, expected]
    assert engine.run(lora_name="mine", lora_id=old)[1].reason is FinishReason.ERROR, "dropped with the last that used it"
    assert engine.run(lora_name="mine")[0] == engine.run(lora_name="mine", lora_id=new)[0] != expected


def test_staging_answers_with_the_reason_when_an_adapter_cannot_be_served(model: Path, paths: dict[str, str]) -> None:
    engine = Engine(model)
    lora_id = engine.call("stage_lora", paths["sql"])["id"]
    assert engine.call("list_loras") == []
    missing = engine.call("stage_lora", "/no/such")
    assert missing == {"id": None, "error": "adapter directory '/no/such' does not exist", "is_missing": True}
    assert engine.run(lora_name="sql", lora_id=lora_id)[1].reason is FinishReason.LENGTH
    assert engine.call("sync_loras", [["chat", paths["chat"], engine.call("stage_lora", paths["chat"])["id"], True]]) == {}
    assert engine.run(lora_name="sql", lora_id=lora_id)[1].reason is FinishReason.ERROR
    assert [(lora["name"], lora["is_pinned"]) for lora in engine.call("list_loras")] == [("chat", True)]


def test_errors_of_utilities_say_what_is_wrong(model: Path, paths: dict[str, str]) -> None:
    engine = Engine(model, max_loras=1)
    assert "adapter directory '/no/such' does not exist" in engine.error("add_lora", "x", "/no/such")
    assert "'x' is not loaded" in engine.error("pin_lora", "x")
    engine.call("add_lora", "x", paths["sql"])
    assert "one of the 1 slots (--max-loras)" in engine.error("pin_lora", "x")
    assert engine.call("remove_lora", "x") is True
    assert engine.call("remove_lora", "x") is False
    assert "start it with --enable-lora" in Engine(model, enable_lora=False).error("add_lora", "x", paths["sql"])


def test_adapters_of_the_command_line_are_there_from_the_start_or_the_engine_does_not_start(
    model: Path, paths: dict[str, str]
) -> None:
    engine = Engine(model)
    engine.core.loras.load_modules((f"sql={paths['sql']}", f"a={paths['chat']}"))
    assert [lora["name"] for lora in engine.call("list_loras")] == ["sql", "a"]
    with pytest.raises(ConfigError, match="--lora-modules b=/no/such: adapter directory '/no/such' does not exist"):
        engine.core.loras.load_modules(("b=/no/such",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_modules": ("a=/x",)}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "--lora-modules takes NAME=PATH, got 'a'"),
        ({"enable_lora": True, "lora_modules": ("=x",)}, "--lora-modules takes NAME=PATH, got '=x'"),
        ({"enable_lora": True, "lora_modules": ("a=/x", "a=/y")}, "--lora-modules names 'a' twice"),
        ({"max_loras": 0}, "--max-loras must be at least 1, got 0"),
        ({"max_lora_rank": 513}, "--max-lora-rank must be at most 512, got 513"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert str(caught.value) == message

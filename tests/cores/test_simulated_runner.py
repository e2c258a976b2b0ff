"""The simulated runner: the contract of all runners, its cost model, its text, its faults."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cores.config import ConfigError, EngineConfig, SimulatedConfig
from cores.engine_core import EngineCore
from cores.messages import FinishReason, RankId
from cores.pooling_params import PoolingParams
from cores.request import Request
from cores.runner.faults import FaultScript, TokenFaults
from cores.runner.interface import ModelRunner, ScheduledRequest, SchedulerOutput
from cores.runner.model_dir import read_model_dir
from cores.runner.simulated import SimulatedFaultError, SimulatedModelRunner, num_kv_blocks, step_cost_s
from cores.testing import ManualClock, make_request, make_tiny_model_dir
from tests.cores.runner_contract import RunnerContract

RANK = RankId(1, 2)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"))


def make_config(model: Path, fault: str = "", **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(model), engine="simulated", simulated=SimulatedConfig(fault=fault), **settings)


class TestSimulatedModelRunner(RunnerContract):
    @pytest.fixture
    def model(self, tiny_model: Path) -> Path:
        return tiny_model

    @pytest.fixture
    def make_runner(self) -> Callable[[EngineConfig], ModelRunner]:
        return lambda config: SimulatedModelRunner(config, RANK, sleep=lambda _: None)


# --- cost -------------------------------------------------------------------------------------------------------------


def scheduled(num_computed: int, num_tokens: int) -> ScheduledRequest:
    request = Request.from_engine_core_request(0, make_request(1, prompt=num_computed + num_tokens), 1000)
    request.num_computed_tokens = num_computed
    return ScheduledRequest(request, num_tokens, True)


def test_a_step_costs_what_the_formula_says() -> None:
    batch = SchedulerOutput([scheduled(100, 1), scheduled(50, 30)], num_decodes=1, num_tokens=31)
    cost = SimulatedConfig(step_ms=5.0, prefill_us=20.0, seq_us=10.0, ctx_ns=100.0)
    assert step_cost_s(cost, batch) == pytest.approx(5e-3 + 30 * 20e-6 + 2 * 10e-6 + (101 + 80) * 100e-9)


def test_the_engine_measures_the_cost_that_was_slept(tiny_model: Path) -> None:
    clock = ManualClock()
    config = make_config(tiny_model)
    runner = SimulatedModelRunner(config, RANK, clock.sleep, clock)
    core = EngineCore(RANK, config, runner.load(), runner, clock)
    core.add_request(0, make_request(1, prompt=100, max_tokens=3))
    core.step()
    assert core.load().step_ms == pytest.approx(5.0 + 2.0 + 0.02)
    core.step()
    assert core.load().step_ms == pytest.approx(0.9 * 7.02 + 0.1 * 5.02)
    assert core.load().decode_tokens_per_s == pytest.approx(1 / 5.02e-3)
    core.add_request(0, make_request(2, prompt=1000, max_tokens=3))
    core.step()
    assert core.load().prefill_tokens_per_s == pytest.approx(1 / 20e-6, rel=0.02)


@pytest.mark.parametrize(("own_s", "period_s"), [(0.0, 5.02e-3), (1e-3, 5.02e-3), (4e-3, 9.02e-3)])
def test_what_the_engine_does_itself_is_in_a_steps_time_unless_it_is_too_much(
    tiny_model: Path, own_s: float, period_s: float
) -> None:
    clock = ManualClock()
    config = make_config(tiny_model)
    runner = SimulatedModelRunner(config, RANK, clock.sleep, clock)
    core = EngineCore(RANK, config, runner.load(), runner, clock)
    core.add_request(0, make_request(1, prompt=1, max_tokens=30))
    core.step()
    begin_s = clock()
    for _ in range(10):
        clock.sleep(own_s)
        core.step()
    assert (clock() - begin_s) / 10 == pytest.approx(period_s)


def test_idle_time_makes_no_step_shorter(tiny_model: Path) -> None:
    clock = ManualClock()
    config = make_config(tiny_model)
    runner = SimulatedModelRunner(config, RANK, clock.sleep, clock)
    core = EngineCore(RANK, config, runner.load(), runner, clock)
    for handle in (1, 2):
        core.add_request(0, make_request(handle, prompt=1, max_tokens=1))
        begin_s = clock()
        core.step()
        assert clock() - begin_s == pytest.approx(5.04e-3)
        clock.sleep(1e-3)


# --- the model directory ----------------------------------------------------------------------------------------------


def test_every_token_is_printable_text_and_none_special(tiny_model: Path) -> None:
    model = read_model_dir(str(tiny_model))
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in model.printable_token_ids]
    assert all(text.isascii() and text.isprintable() and text for text in texts)
    assert {" the", "a", " ", "~"} <= set(texts)
    assert not {0, 1, 2} & set(model.printable_token_ids)
    assert tokenizer.decode(model.printable_token_ids) == "".join(texts)  # no token changes its neighbour's text
    assert (model.eos_token_ids, model.max_model_len) == ((2, 0), 2048)


def test_eos_comes_from_config_json_when_there_is_no_generation_config(tmp_path: Path) -> None:
    make_tiny_model_dir(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert read_model_dir(str(tmp_path)).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"cannot read .*config\.json: No such file"),
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json must hold a JSON object, got list"),
        ("config.json", json.dumps({"vocab_size": 0}), "vocab_size must be a positive number, got 0"),
        ("config.json", json.dumps({"vocab_size": 9}), "max_position_embeddings must be a positive number, got None"),
        ("tokenizer.json", None, r"cannot read .*tokenizer\.json"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_a_broken_model_directory_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    make_tiny_model_dir(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model_dir(str(tmp_path))


def test_the_cache_has_room_for_all_sequences_unless_told_otherwise(tiny_model: Path) -> None:
    assert num_kv_blocks(make_config(tiny_model, max_num_seqs=4), max_model_len=1000) == 4 * 1000 // 16
    assert num_kv_blocks(make_config(tiny_model, max_num_seqs=4), max_model_len=100_000) == 100_000 // 16
    assert num_kv_blocks(make_config(tiny_model, max_num_seqs=64), max_model_len=100_000) == 64 * 4096 // 16
    assert num_kv_blocks(make_config(tiny_model, num_kv_blocks=7), max_model_len=100_000) == 7
    with pytest.raises(ConfigError, match="use --num-kv-blocks"):
        num_kv_blocks(make_config(tiny_model, kv_cache_memory_bytes=10**9), max_model_len=100)


def test_any_model_length_goes(tiny_model: Path) -> None:
    info = SimulatedModelRunner(make_config(tiny_model, max_model_len=1_000_000), RANK).load()
    assert info.max_model_len == 1_000_000


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_script_is_read_for_one_life_of_one_rank() -> None:
    text = "die_at_step=5@rank=1@epoch=2; raise_at_step=6@rank=0 ;stall_at_step=7@epoch=2;"
    text += "fail_request_at_token=3; die_at_step=8@epoch=1;fail_request_at_token=4@seed=7"
    tokens = TokenFaults(frozenset({(3, None), (4, 7)}))
    assert FaultScript.parse(text, RANK) == FaultScript({5: "die", 7: "stall"}, tokens)
    assert FaultScript.parse(text, RankId(0, 1)) == FaultScript({6: "raise", 8: "die"}, tokens)
    assert FaultScript.parse("", RANK) == FaultScript({})
    assert [tokens.hits(n, seed) for n, seed in ((3, None), (3, 7), (4, 7), (4, 8), (4, None), (5, 7))] == [True] * 3 + [
        False
    ] * 3


@pytest.mark.parametrize(
    "text",
    ["die", "die_at_step", "die_at_step=x", "die_at_step=-1", "explode_at_step=1", "die_at_step=1@node=2", "die_at_step=1@rank",
     "fail_request_at_token=0", "die_at_step=1@seed=1", "die_at_step=1,raise_at_step=2"],
)  # fmt: skip
def test_a_script_outside_the_grammar_is_refused_with_the_item_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--simulated fault") as caught:
        FaultScript.parse(f"raise_at_step=9;{text}", RANK)
    assert repr(text) in str(caught.value)


def make_core(model: Path, fault: str) -> EngineCore:
    config = make_config(model, fault)
    runner = SimulatedModelRunner(config, RANK, sleep=_no_sleep_over_a_minute)
    return EngineCore(RANK, config, runner.load(), runner, ManualClock())


class StalledError(Exception):
    """Raised by the fake sleep in place of an endless one."""


def _no_sleep_over_a_minute(seconds: float) -> None:
    if seconds > 60:
        raise StalledError


def test_faults_happen_at_their_step(tiny_model: Path) -> None:
    for fault, error in (("raise_at_step=3", SimulatedFaultError), ("stall_at_step=3", StalledError)):
        core = make_core(tiny_model, fault)
        core.add_request(0, make_request(1, max_tokens=9))
        core.step()
        core.step()
        with pytest.raises(error):
            core.step()


def test_faults_at_step_zero_happen_while_loading(tiny_model: Path) -> None:
    with pytest.raises(SimulatedFaultError, match=r"at step 0 of rank 1 \(epoch 2\)"):
        make_core(tiny_model, "raise_at_step=0")
    with pytest.raises(StalledError):
        make_core(tiny_model, "stall_at_step=0")


def test_a_scripted_request_error_hits_its_token_also_of_a_continued_request(tiny_model: Path) -> None:
    core = make_core(tiny_model, "fail_request_at_token=3")
    core.add_request(0, make_request(1, prompt=10, max_tokens=2))
    core.add_request(0, make_request(2, prompt=10, max_tokens=9))
    core.add_request(0, make_request(3, prompt=10, num_original_prompt_tokens=9, max_tokens=9))
    finished = {}
    num_tokens: dict[int, int] = {}
    while core.has_work:
        for outputs in core.step().values():
            counts = outputs.counts or [1] * len(outputs.handles)
            for row, handle in enumerate(outputs.handles):
                num_tokens[handle] = num_tokens.get(handle, 0) + counts[row]
                if row in outputs.finished:
                    finished[handle] = outputs.finished[row]
    assert num_tokens == {1: 2, 2: 2, 3: 1}
    assert finished[1].reason is FinishReason.LENGTH
    assert [(finished[h].reason, finished[h].error) for h in (2, 3)] == [(FinishReason.ERROR, "simulated fault at token 3")] * 2


def test_speed_can_be_changed_while_it_runs(tiny_model: Path) -> None:
    naps: list[float] = []
    config = make_config(tiny_model)
    runner = SimulatedModelRunner(config, RANK, sleep=naps.append, clock=ManualClock())
    core = EngineCore(RANK, config, runner.load(), runner, ManualClock())
    core.add_request(0, make_request(1, max_tokens=9))
    for step_ms in (config.simulated.step_ms, 700.0, 0.0):
        core.operations.collective_rpc("set_step_ms", [step_ms])
        core.step()
    assert [round(nap, 1) for nap in naps] == [0.0, 0.7, 0.0]
    with pytest.raises(ValueError, match="at least 0, got -1"):
        runner.set_step_ms(-1)


# --- vectors ----------------------------------------------------------------------------------------------------------


def test_vectors_have_length_one_and_depend_on_the_prompt_alone(tiny_model: Path) -> None:
    config = make_config(tiny_model, runner="pooling", max_num_batched_tokens=16)
    runner = SimulatedModelRunner(config, RANK, sleep=lambda _: None)
    info = runner.load()
    assert (info.supported_tasks, info.embedding_size) == (("embed",), 64)
    core = EngineCore(RANK, config, info, runner, ManualClock())
    for handle, prompt in ((1, [7] * 40), (2, [8]), (3, [7] * 40)):
        core.add_request(0, replace(make_request(handle, prompt), pooling_params=PoolingParams()))
    vectors: dict[int, array[float]] = {}
    while core.has_work:
        for outputs in core.step().values():
            vectors |= {outputs.handles[row]: array("f", vector) for row, vector in outputs.vectors.items()}
    assert vectors[1] == vectors[3] != vectors[2]
    assert [math.hypot(*vector) for vector in vectors.values()] == pytest.approx([1.0] * 3)


def test_a_text_model_makes_text_unless_told_otherwise(tiny_model: Path) -> None:
    info = SimulatedModelRunner(make_config(tiny_model), RANK).load()
    assert (info.supported_tasks, info.embedding_size) == (("generate",), 0)

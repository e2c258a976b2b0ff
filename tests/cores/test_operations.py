"""Pause, sleep, new weights, profiles: on an engine core whose runner writes down what it is told."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from cores.config import ConfigError, EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineState, FinishReason, RankId, UtilityCall, UtilityResult
from cores.runner.interface import ModelInfo, ModelRunnerOutput, SchedulerOutput
from cores.testing import ManualClock, make_request

RANK = RankId(1, 3)


class WritingRunner:
    """The next token is the request's length. `log` has what it was told."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.num_computed: list[int] = []  # tokens of each step
        self.unreadable = False

    def load(self) -> ModelInfo:
        return ModelInfo("cpu", max_model_len=200, vocab_size=1000, eos_token_ids=(), num_kv_blocks=100, block_size=4)

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        self.num_computed.append(batch.num_tokens)
        return ModelRunnerOutput([s.request.num_tokens for s in batch.scheduled if s.samples])

    def sleep(self, level: int) -> None:
        self.log.append(("sleep", level))

    def wake_up(self, tags: Collection[str]) -> None:
        self.log.append(("wake_up", sorted(tags)))

    def prepare_weights(self, directory: str) -> None:
        if self.unreadable:
            raise ConfigError("they do not fit")
        self.log.append(("prepare", directory))

    def commit_weights(self) -> None:
        self.log.append("commit")

    def discard_weights(self) -> None:
        self.log.append("discard")

    def start_profile(self) -> None:
        self.log.append("start_profile")

    def stop_profile(self, stem: Path) -> Path:
        return stem.with_suffix(".txt")

    def echo(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [args, kwargs]

    def shutdown(self) -> None: ...


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.runner = WritingRunner()
        config = EngineConfig(block_size=4, **settings)
        self.core = EngineCore(RANK, config, self.runner.load(), self.runner, ManualClock())
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.errors: dict[int, str | None] = {}
        self.versions: list[int] = []

    def add(self, handle: int, prompt: Any = 10, max_tokens: int = 5) -> None:
        self.core.add_request(0, make_request(handle, prompt, max_tokens=max_tokens))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for outputs in self.core.step().values():
                self.versions.append(outputs.weight_version)
                token_ids = iter(outputs.token_ids)
                for row, handle in enumerate(outputs.handles):
                    if outputs.counts is None or outputs.counts[row]:
                        self.tokens.setdefault(handle, []).append(next(token_ids))
                    if row in outputs.finished:
                        self.ends[handle] = outputs.finished[row].reason
                        self.errors[handle] = outputs.finished[row].error

    def begin(self, method: str, *args: Any) -> UtilityResult | None:
        return self.core.call_utility(UtilityCall(1, 5, method, args))

    def call(self, method: str, *args: Any) -> Any:
        """To its answer, with the steps that it takes. Raises `AssertionError` with its error."""
        result = self.begin(method, *args)
        while result is None:
            self.step()
            for _, late in self.core.take_late_results():
                result = late
        assert result.error is None, result.error
        return result.value

    def refusal(self, method: str, *args: Any) -> str:
        result = self.begin(method, *args)
        assert result is not None
        assert result.is_refusal
        assert result.error is not None
        return result.error


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.core.check_invariants()


# --- pause ------------------------------------------------------------------------------------------------------------


def test_pause_aborts_what_runs_and_answers_behind_the_last_output(rig: Rig) -> None:
    rig.add(1)
    rig.step()
    assert rig.begin("pause") is None
    assert (rig.core.state, rig.core.has_work) == (EngineState.DRAINING, True)
    assert rig.core.take_late_results() == []
    rig.step()
    assert rig.ends == {1: FinishReason.ABORT}
    assert rig.core.take_late_results() == [(0, UtilityResult(RANK, 5))]
    assert rig.core.state is EngineState.PAUSED
    assert rig.call("is_paused") is True


def test_pause_can_wait_until_all_have_ended(rig: Rig) -> None:
    rig.add(1, max_tokens=5)
    rig.add(2, max_tokens=2)
    rig.call("pause", "wait")
    assert rig.ends == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert len(rig.tokens[1]) == 5
    assert rig.core.state is EngineState.PAUSED


@pytest.mark.parametrize("clear_cache", [False, True], ids=["in place", "to be computed again"])
def test_pause_can_keep_what_runs_and_it_goes_on_where_it_was(rig: Rig, clear_cache: bool) -> None:
    rig.add(1, max_tokens=6)
    rig.step(2)
    rig.call("pause", "keep", clear_cache)
    assert (rig.core.has_work, rig.core.has_requests) == (False, True)
    rig.step(3)
    assert rig.tokens == {1: [10, 11]}
    rig.call("resume")
    rig.step(4)
    assert rig.tokens == {1: [10, 11, 12, 13, 14, 15]}
    assert rig.ends == {1: FinishReason.LENGTH}
    assert rig.runner.num_computed == ([10, 1, 12, 1, 1, 1] if clear_cache else [10, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_request_that_comes_too_late_is_rejected_at_once(rig: Rig, mode: str) -> None:
    rig.add(1, max_tokens=3)
    rig.step()
    rig.begin("pause", mode)
    rig.add(2)
    rig.step()
    assert rig.ends[2] is FinishReason.REJECTED
    assert rig.errors[2] == f"the engine is {'paused' if mode == 'keep' else 'draining'}"


def test_a_kept_request_can_be_aborted_while_it_stands(rig: Rig) -> None:
    rig.add(1)
    rig.step()
    rig.call("pause", "keep")
    rig.core.abort_requests(0, [1])
    assert not rig.core.has_requests
    assert rig.core.load().num_kv_blocks_used == 0


def test_resume_calls_off_a_pause_that_still_waits(rig: Rig) -> None:
    rig.add(1, max_tokens=5)
    rig.begin("pause", "wait")
    rig.step()
    rig.call("resume")
    ((_, result),) = rig.core.take_late_results()
    assert result.error is not None
    assert "called off" in result.error
    rig.step(5)
    assert rig.ends == {1: FinishReason.LENGTH}
    assert rig.core.state is EngineState.READY


def test_waiting_for_what_stands_still_is_refused_instead_of_for_ever(rig: Rig) -> None:
    rig.add(1)
    rig.step()
    rig.call("pause", "keep")
    assert "cannot end" in rig.refusal("pause", "wait")
    rig.call("pause", "abort")
    assert rig.ends == {1: FinishReason.ABORT}


def test_an_unknown_mode_is_refused_with_those_that_exist(rig: Rig) -> None:
    assert rig.refusal("pause", "later") == "mode must be one of abort, wait, keep, got 'later'"
    assert rig.core.state is EngineState.READY


def test_a_front_end_that_is_gone_pauses_the_engine_all_the_same(rig: Rig) -> None:
    rig.begin("pause", "abort")
    rig.core.forget_client(0)
    assert rig.core.take_late_results() == []
    assert rig.core.state is EngineState.PAUSED


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_a_sleeping_engine_has_no_cache_and_makes_no_steps(rig: Rig) -> None:
    prompt = [7] * 20
    rig.add(1, prompt, max_tokens=1)
    rig.step()
    rig.call("sleep", 2)
    assert rig.runner.log == [("sleep", 2)]
    assert (rig.core.state, rig.call("is_sleeping")) == (EngineState.SLEEPING, True)
    rig.call("wake_up", ["weights"])
    assert rig.call("is_sleeping") is True
    rig.call("wake_up")
    assert rig.runner.log[1:] == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert rig.core.state is EngineState.READY
    rig.add(2, prompt, max_tokens=1)
    rig.step()
    assert rig.runner.num_computed[-1] == 20  # nothing of the old cache was found


def test_requests_can_be_kept_over_a_sleep(rig: Rig) -> None:
    rig.add(1, max_tokens=4)
    rig.step(2)
    rig.call("sleep", 1, "keep")
    assert rig.core.load().num_kv_blocks_used == 0
    rig.step(2)
    rig.call("wake_up")
    rig.step(2)
    assert rig.tokens == {1: [10, 11, 12, 13]}


def test_bad_levels_and_tags_are_refused(rig: Rig) -> None:
    assert rig.refusal("sleep", 3) == "level must be one of 1, 2, got 3"
    assert "got 'gpu'" in rig.refusal("wake_up", ["gpu"])
    rig.call("sleep")
    assert "wake it up" in rig.refusal("resume")


# --- weights ----------------------------------------------------------------------------------------------------------


def test_new_weights_give_outputs_a_version_and_forget_what_was_computed(rig: Rig) -> None:
    rig.add(1, max_tokens=4)
    rig.step(2)
    assert rig.call("update_weights", "/w", 7) == 7
    rig.step(2)
    assert rig.tokens == {1: [10, 11, 12, 13]}
    assert rig.runner.num_computed == [10, 1, 12, 1]
    assert rig.versions == [0, 0, 7, 7]
    assert rig.call("get_weight_version") == 7
    assert rig.runner.log == [("prepare", "/w"), "commit"]


def test_weights_that_do_not_fit_change_nothing(rig: Rig) -> None:
    rig.runner.unreadable = True
    rig.add(1, max_tokens=4)
    rig.step(2)
    assert rig.refusal("update_weights", "/w", 7) == "they do not fit"
    rig.step(2)
    assert rig.runner.num_computed == [10, 1, 1, 1]
    assert (rig.versions, rig.runner.log) == ([0, 0, 0, 0], [])


def test_only_prepared_weights_can_be_committed(rig: Rig) -> None:
    def commit() -> str:
        result = rig.begin("commit_weights", "/w", 1)
        assert result is not None
        assert not result.is_refusal
        return str(result.error)

    assert "no weights from '/w' are prepared" in commit()
    rig.call("prepare_weights", "/w")
    rig.call("discard_weights")
    assert "prepared" in commit()
    rig.call("prepare_weights", "/other")
    assert "prepared" in commit()


def test_sleeping_weights_are_not_replaced(rig: Rig) -> None:
    rig.call("sleep")
    assert "wake them up first" in rig.refusal("update_weights", "/w", 1)
    rig.call("wake_up", ["weights"])
    assert rig.call("update_weights", "/w", 1) == 1


# --- an engine that starts again --------------------------------------------------------------------------------------

FRESH = {"weights_directory": None, "weight_version": 0, "is_paused": False, "sleep_level": 1, "asleep": []}


def test_an_engine_that_starts_again_becomes_what_its_group_is(rig: Rig) -> None:
    rig.call("restore", FRESH)
    assert (rig.core.state, rig.runner.log) == (EngineState.READY, [])
    settings = FRESH | {
        "weights_directory": "/w", "weight_version": 4, "is_paused": True, "sleep_level": 2, "asleep": ["kv_cache"]
    }  # fmt: skip
    rig.call("restore", settings)
    told = [("prepare", "/w"), "commit", ("sleep", 2), ("wake_up", ["weights"])]
    assert (rig.core.state, rig.runner.log) == (EngineState.SLEEPING, told)
    assert rig.call("get_weight_version") == 4
    rig.call("restore", settings)  # by another front end
    assert rig.runner.log == told
    rig.call("wake_up")
    assert rig.core.state is EngineState.PAUSED


def test_what_a_front_end_that_starts_again_finds_goes_on(rig: Rig) -> None:
    rig.add(1, max_tokens=3)
    rig.step()
    rig.call("restore", FRESH)
    rig.step(2)
    assert rig.ends == {1: FinishReason.LENGTH}
    assert rig.runner.num_computed == [10, 1, 1]


# --- caches and looking inside ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("running_too", [False, True])
def test_reset_prefix_cache_forgets_prefixes_and_if_asked_what_runs(rig: Rig, running_too: bool) -> None:
    rig.add(1, [5] * 20, max_tokens=3)
    rig.step()
    rig.call("reset_prefix_cache", running_too)
    rig.add(2, [5] * 20, max_tokens=1)
    rig.step()
    # Both are computed again, but what they have in common in one step only once.
    assert rig.runner.num_computed == [20, 21 + 4 if running_too else 20 + 1]


def test_caches_that_a_text_model_has_not_are_always_empty(rig: Rig) -> None:
    assert rig.call("reset_mm_cache") is None
    assert rig.call("reset_encoder_cache") is None


def test_a_method_of_the_runner_is_called_by_name(rig: Rig) -> None:
    assert rig.call("collective_rpc", "echo", [1, "two"], {"three": 3}) == [(1, "two"), {"three": 3}]
    for hidden in ("_private", "log", "nonsense"):
        assert rig.refusal("collective_rpc", hidden) == f"WritingRunner has no method {hidden!r}"


def test_stats_are_plain_values(rig: Rig) -> None:
    rig.add(1)
    rig.step()
    stats = rig.call("get_stats")
    assert (stats["state"], stats["weight_version"]) == ("ready", 0)
    assert stats["load"]["num_running"] == 1
    assert stats["scheduler"]["num_prompt_tokens"] == 10


def test_profiles_are_numbered_and_need_a_place(tmp_path: Path) -> None:
    assert "--profile-dir" in Rig().refusal("start_profile")
    rig = Rig(profile_dir=str(tmp_path / "new"))
    assert "no profile is running" in rig.refusal("stop_profile")
    for number in (1, 2):
        rig.call("start_profile")
        assert "running already" in rig.refusal("start_profile")
        assert rig.call("stop_profile") == str(tmp_path / "new" / f"rank-1-3-{number}.txt")

"""A real engine core process over real sockets, from its first frame to its last."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cores.config import SimulatedConfig
from cores.control_messages import EngineStarting
from cores.engine_core_proc import run_engine_core
from cores.messages import (
    EngineCoreDead,
    EngineCoreOutputs,
    EngineReady,
    FinishReason,
    Heartbeat,
    LoadReport,
    RankId,
    UtilityResult,
)
from cores.testing import make_request, make_tiny_model_dir
from tests.integration.engine_core_harness import DEADLINE_S, EngineHarness

FAST = SimulatedConfig(step_ms=1.0, prefill_us=0.0, seq_us=0.0)
SLOW = SimulatedConfig(step_ms=50.0)  # what has 1,900 tokens does not end while the test looks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"))


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


def test_it_says_starting_then_ready_to_launcher_and_front_end(engine: EngineHarness) -> None:
    ready = engine.start_ready(max_model_len=500, num_kv_blocks=64, block_size=8, max_num_seqs=5)
    starting = engine.receive_control(EngineStarting)
    assert engine.process is not None
    assert (starting.rank_id, starting.pid) == (RankId(0, 1), engine.process.pid)
    assert engine.receive_control(EngineReady) == ready
    assert (ready.device, ready.max_model_len, ready.num_kv_blocks, ready.block_size) == ("cpu", 500, 64, 8)
    assert (ready.eos_token_ids, ready.max_num_seqs, ready.vocab_size) == ((2, 0), 5, 484)


def test_twenty_requests_get_exactly_their_tokens(engine: EngineHarness) -> None:
    engine.start_ready(FAST)
    front_end = engine.front_end
    for handle in range(20):
        front_end.add(make_request(handle, prompt=5 + 13 * handle, max_tokens=1 + 3 * handle))
    front_end.receive_until(lambda: len(front_end.finished) == 20)
    assert {h: len(t) for h, t in front_end.tokens.items()} == {h: 1 + 3 * h for h in range(20)}
    assert {f.reason for f in front_end.finished.values()} == {FinishReason.LENGTH}
    firsts = [m for m in front_end.received if isinstance(m, EngineCoreOutputs) for _ in m.first_tokens]
    assert len(firsts) == 20
    # The last outputs already tell of an idle engine that has seen all commands.
    last = next(m for m in reversed(front_end.received) if isinstance(m, EngineCoreOutputs))
    assert (last.command_seq, last.load.num_running, last.load.num_waiting, last.load.num_kv_blocks_used) == (
        engine.front_end.seq_before + 20,
        0,
        0,
        0,
    )


def test_an_aborted_request_gets_no_token_from_a_step_that_has_seen_the_abort(engine: EngineHarness) -> None:
    engine.start_ready(SLOW)
    front_end = engine.front_end
    front_end.add(make_request(1, max_tokens=2000))
    front_end.add(make_request(2, max_tokens=2000))
    front_end.receive_until(lambda: len(front_end.tokens.get(1, [])) >= 3)
    seq = front_end.abort(1)
    front_end.receive_until(lambda: _last_outputs(engine).command_seq == seq)
    seen_at = _last_outputs(engine).step
    front_end.receive_until(lambda: _last_outputs(engine).step >= seen_at + 10)
    assert front_end.last_step_of[1] < seen_at
    assert front_end.last_step_of[2] >= seen_at + 10
    assert _last_outputs(engine).load.num_running == 1
    assert 1 not in front_end.finished


def _last_outputs(engine: EngineHarness) -> EngineCoreOutputs:
    return next(m for m in reversed(engine.front_end.received) if isinstance(m, EngineCoreOutputs))


def test_garbage_frames_are_dropped_and_told_of(engine: EngineHarness) -> None:
    engine.start_ready(FAST)
    front_end = engine.front_end
    for frames in ([b""], [b"\xc1"], [b"\x91\x01"], [b"two", b"frames"], [bytes(range(256)) * 50], [b"\x92\x63\x01"]):
        front_end.send_raw(*frames)
    front_end.add(make_request(1, max_tokens=3))
    front_end.receive_until(lambda: 1 in front_end.finished)
    assert len(front_end.tokens[1]) == 3
    engine.shut_down(10.0)
    assert engine.wait_exit() == 0
    assert 1 <= engine.stderr().count("dropped a frame from front end 0") < 6  # told once a second at most


def test_two_front_ends_with_the_same_handles_are_kept_apart(directory: Path, model: Path) -> None:
    engine = EngineHarness(directory, model, num_front_ends=2, rank=1, epoch=3)
    try:
        ready = engine.start_ready(FAST)
        assert ready.rank_id == RankId(1, 3)
        first, second = engine.front_ends
        first.add(make_request(7, prompt=[5] * 10, max_tokens=4))
        second.add(make_request(7, prompt=[6] * 20, max_tokens=6))
        first.receive_until(lambda: 7 in first.finished)
        second.receive_until(lambda: 7 in second.finished)
        assert (len(first.tokens[7]), len(second.tokens[7])) == (4, 6)
        # The one that has nothing running hears of the other's work all the same.
        second.add(make_request(8, max_tokens=400))
        first.receive_until(lambda: any(isinstance(m, LoadReport) and m.load.num_running == 1 for m in first.received))
    finally:
        engine.close()


def test_a_front_end_that_comes_back_finds_an_engine_that_has_forgotten_its_predecessor(engine: EngineHarness) -> None:
    first_ready = engine.start_ready(SLOW)
    for handle in (1, 2):
        engine.front_end.add(make_request(handle, max_tokens=2000))
    engine.front_end.receive_until(lambda: len(engine.front_end.tokens) == 2)
    front_end = engine.attach_new_front_end()
    assert front_end.wait_ready() == first_ready
    front_end.add(make_request(1, max_tokens=3))  # the handle is in use, by the dead one
    front_end.receive_until(lambda: 1 in front_end.finished)
    assert len(front_end.tokens[1]) == 3
    assert front_end.tokens.keys() == {1}
    beat = front_end.receive_one(Heartbeat)
    assert (beat.has_work, beat.command_seq, beat.load.num_kv_blocks_used) == (False, front_end.seq_before + 1, 0)


def test_utilities_answer_by_call_id_and_an_unknown_one_is_an_error(engine: EngineHarness) -> None:
    engine.start_ready(FAST)
    call_id = engine.front_end.call("reset_prefix_cache")
    assert engine.front_end.receive_one(UtilityResult) == UtilityResult(RankId(0, 1), call_id)
    engine.front_end.call("format_disk")
    result = engine.front_end.receive_one(UtilityResult)
    assert result.error is not None
    assert result.error.startswith("unknown utility 'format_disk'; there are ")


def test_heartbeats_come_while_idle(engine: EngineHarness) -> None:
    engine.start_ready(FAST)
    beats = [engine.front_end.receive_one(Heartbeat) for _ in range(3)]
    assert {(b.step, b.has_work) for b in beats} == {(0, False)}


def test_heartbeats_go_on_through_a_stall_and_show_no_progress(engine: EngineHarness) -> None:
    engine.start_ready(SimulatedConfig(step_ms=1.0, fault="stall_at_step=4"))
    engine.front_end.add(make_request(1, max_tokens=100))
    engine.front_end.receive_until(lambda: len(engine.front_end.tokens.get(1, [])) == 3)
    beats = [engine.front_end.receive_one(Heartbeat) for _ in range(3)]
    assert {(b.step, b.has_work) for b in beats} == {(3, True)}


def test_shutdown_drains_refuses_new_requests_and_says_goodbye_last(engine: EngineHarness) -> None:
    engine.start_ready(SLOW)
    front_end = engine.front_end
    front_end.add(make_request(1, max_tokens=300))
    front_end.receive_until(lambda: 1 in front_end.tokens)
    engine.shut_down(60.0)
    for handle in range(2, 200):  # until the first that comes after the shutdown, which goes another way
        front_end.add(make_request(handle, max_tokens=1))
        front_end.receive_until(lambda handle=handle: handle in front_end.finished)  # type: ignore[misc]
        if front_end.finished[handle].reason is FinishReason.ABORT:
            break
    assert front_end.finished[handle].reason is FinishReason.ABORT
    assert front_end.tokens[handle] == []
    front_end.call("collective_rpc", "set_step_ms", [0.0])
    assert front_end.receive_one(EngineCoreDead) == EngineCoreDead(RankId(0, 1), "")
    assert front_end.finished[1].reason is FinishReason.LENGTH
    assert len(front_end.tokens[1]) == 300
    assert engine.receive_control(EngineCoreDead).cause == ""
    assert engine.wait_exit() == 0


def test_shutdown_aborts_what_has_not_ended_in_time(engine: EngineHarness) -> None:
    engine.start_ready(SLOW)
    front_end = engine.front_end
    for handle in (1, 2):
        front_end.add(make_request(handle, max_tokens=1900))
    front_end.receive_until(lambda: len(front_end.tokens) == 2)
    engine.shut_down(0.05)
    front_end.receive_one(EngineCoreDead)
    assert {f.reason for f in front_end.finished.values()} == {FinishReason.ABORT}
    assert len(front_end.finished) == 2
    assert engine.wait_exit() == 0


def test_sigterm_ends_requests_and_process_without_draining(engine: EngineHarness) -> None:
    engine.start_ready(SLOW)
    front_end = engine.front_end
    front_end.add(make_request(1, max_tokens=1900))
    front_end.receive_until(lambda: 1 in front_end.tokens)
    assert engine.process is not None
    engine.process.send_signal(signal.SIGINT)  # ignored
    engine.process.send_signal(signal.SIGTERM)
    assert front_end.receive_one(EngineCoreDead).cause == ""
    assert front_end.finished[1].reason is FinishReason.ABORT
    assert engine.wait_exit() == 0


def test_an_exception_in_a_step_is_told_to_everybody_with_its_traceback(engine: EngineHarness) -> None:
    engine.start_ready(SimulatedConfig(step_ms=1.0, fault="raise_at_step=3"))
    front_end = engine.front_end
    front_end.add(make_request(1, max_tokens=100))
    dead = front_end.receive_one(EngineCoreDead)
    first_line, *rest = dead.cause.splitlines()
    assert first_line == "SimulatedFaultError: simulated fault at step 3 of rank 0 (epoch 1)"
    assert rest[0].startswith("Traceback")
    assert len(front_end.tokens[1]) == 2  # what was computed before it arrived before it
    assert engine.receive_control(EngineCoreDead) == dead
    assert engine.wait_exit() == 1


def test_it_lives_and_ends_in_a_thread_of_another_process_too(engine: EngineHarness) -> None:
    """As in a Ray actor: no signal handlers, no process of its own."""
    launch = engine.launch_config(FAST)
    with ThreadPoolExecutor(1) as executor:
        exit_code = executor.submit(run_engine_core, launch)
        engine.front_end.wait_ready()
        engine.front_end.add(make_request(1, max_tokens=5))
        engine.front_end.receive_until(lambda: 1 in engine.front_end.finished)
        engine.shut_down(10.0)
        engine.front_end.receive_one(EngineCoreDead)
        assert exit_code.result(DEADLINE_S) == 0


def test_a_missing_model_is_one_clear_line_to_the_launcher(engine: EngineHarness) -> None:
    engine.start(model="/nowhere/model")
    assert engine.receive_control(EngineCoreDead).cause == "model directory '/nowhere/model' does not exist"
    assert engine.wait_exit() == 1


def test_a_missing_adapter_is_one_clear_line_to_the_launcher(engine: EngineHarness) -> None:
    engine.start(FAST, enable_lora=True, lora_modules=("sql=/nowhere/sql",))
    cause = "--lora-modules sql=/nowhere/sql: adapter directory '/nowhere/sql' does not exist"
    assert engine.receive_control(EngineCoreDead).cause == cause
    assert engine.wait_exit() != 0


def test_sigterm_while_loading_ends_it(engine: EngineHarness) -> None:
    engine.start(SimulatedConfig(fault="stall_at_step=0"))
    engine.receive_control(EngineStarting)
    assert engine.process is not None
    engine.process.send_signal(signal.SIGTERM)
    assert engine.receive_control(EngineCoreDead).cause == "told to end while loading"
    assert engine.wait_exit() == 1


@pytest.mark.parametrize("fault", ["", "stall_at_step=2"])
def test_the_launchers_death_ends_it_even_in_a_stall(engine: EngineHarness, fault: str) -> None:
    engine.start_ready(SimulatedConfig(step_ms=20.0, fault=fault))
    engine.front_end.add(make_request(1, max_tokens=1900))
    engine.front_end.receive_until(lambda: 1 in engine.front_end.tokens)
    assert engine.process is not None
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.wait_exit() == 1


def test_it_can_be_killed_by_script_at_a_step_of_one_rank_and_epoch(engine: EngineHarness) -> None:
    engine.start_ready(SimulatedConfig(step_ms=1.0, fault="die_at_step=3@rank=0@epoch=1; die_at_step=1@rank=1"))
    engine.front_end.add(make_request(1, max_tokens=100))
    assert engine.wait_exit() == -signal.SIGKILL

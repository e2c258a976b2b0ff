"""A start that fails ends within a bound, says why in its last line, and leaves no process and no file."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.marked_run import MarkedRun, marked_run

KILLED_START_S = 20.0  # from the kill to the end of everything, as promised


class FailingServe:
    """Runs `gateway serve` until it has failed."""

    def __init__(self, marked: MarkedRun) -> None:
        self.marked = marked

    def run(self, *words: str) -> tuple[int, list[str]]:
        """Exit code and lines on stderr. A server that never served has nothing to say on stdout."""
        done = self.marked.run(*words)
        assert done.stdout == ""
        return done.returncode, done.stderr.splitlines()


@pytest.fixture
def failing() -> Iterator[FailingServe]:
    with marked_run() as marked:
        yield FailingServe(marked)
        assert marked.leftovers() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/model"], "gateway serve: MODEL must be a directory with a config.json"),
        (["{tiny}", "--prot", "1"], "gateway serve: unknown flag --prot; did you mean '--port'?"),
        (["{tiny}", "-dp", "0"], "gateway serve: --data-parallel-size must be at least 1, got 0"),
        (
            ["{tiny}", "-dp", "2", "--data-parallel-external-lb", "--data-parallel-rank", "2"],
            "gateway serve: --data-parallel-ra",
        ),
        (["{tiny}", "--chat-template", "/no/such.jinja"], "gateway serve: --chat-template: there is no file '/no/such.jinja'"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(failing: FailingServe, tiny_model: str, words: list[str], message: str) -> None:
    code, lines = failing.run(*(word.replace("{tiny}", tiny_model) for word in words))
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_bad_yaml_key_names_the_nearest(failing: FailingServe, tiny_model: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("max_num_seq: 3\n")
    code, lines = failing.run(tiny_model, "--config", str(file))
    assert code == 2
    assert lines == [f"gateway serve: {file}: unknown key 'max_num_seq'; did you mean 'max-num-seqs'?"]


def test_port_in_use_is_one_line_before_any_model_loads(failing: FailingServe, simulated: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = failing.run(*simulated, "--port", str(port))
    assert code == 1
    assert lines == [f"gateway serve: port {port} on 127.0.0.1 is in use: choose another --port, or 0 for any"]


def test_rank_that_raises_while_loading_ends_the_start_with_its_traceback_last(failing: FailingServe, tiny_model: str) -> None:
    code, lines = failing.run(
        tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "-dp", "2", "--port", "0",
        "--simulated", "fault=raise_at_step=0@rank=1",
    )  # fmt: skip
    assert code == 1
    assert lines[-1].endswith("SimulatedFaultError: simulated fault at step 0 of rank 1 (epoch 1)")
    headline = next(line for line in reversed(lines) if "gateway.launch.serve" in line)
    assert "rank 1 did not start: SimulatedFaultError: simulated fault at step 0" in headline
    traceback = lines[lines.index(headline) + 1 :]
    assert traceback[0] == "Traceback (most recent call last):"


def test_rank_that_is_killed_while_loading_ends_the_start(failing: FailingServe, tiny_model: str) -> None:
    code, lines = failing.run(
        tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "-dp", "2", "--port", "0",
        "--simulated", "fault=die_at_step=0@rank=1",
    )  # fmt: skip
    assert code == 1
    assert "rank 1 did not start: process " in lines[-1]
    assert lines[-1].endswith("was killed by signal 9 (SIGKILL)")


def test_kill_9_while_rank_1_of_2_loads_ends_the_start_with_its_cause_and_leaves_nothing(
    failing: FailingServe, simulated: list[str]
) -> None:
    serve = failing.marked.start(*simulated, "fault=stall_at_step=0", "-dp", "2", "--port", "0")
    failing.marked.until_log_has("rank 1 (epoch 1) on ")
    found = re.search(r"rank 1 \(epoch 1\) on \S+, pid (\d+): loading", failing.marked.log())
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    assert serve.wait(10 * KILLED_START_S) == 1
    last_line = failing.marked.log().splitlines()[-1]
    assert f"rank 1 did not start: process {found[1]} was killed by signal 9 (SIGKILL)" in last_line
    assert failing.marked.processes() == []


def test_rank_that_loads_for_ever_ends_the_start_when_its_time_is_over(failing: FailingServe, tiny_model: str) -> None:
    code, lines = failing.run(
        tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "-dp", "2", "--port", "0",
        "--simulated", "fault=stall_at_step=0@rank=0", "--engine-ready-timeout", "2",
    )  # fmt: skip
    assert code == 1
    assert lines[-1].endswith("rank 0 did not start: rank 0 (epoch 1) was not ready within 2 s")


def test_endpoint_that_fails_ends_the_start_of_all(failing: FailingServe, tiny_model: str) -> None:
    done = failing.marked.run(  # the other endpoint may have been ready for a moment
        tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "-dp", "2", "--port", "0",
        "--data-parallel-multi-port-external-lb", "--simulated", "fault=raise_at_step=0@rank=1",
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert any(line.startswith("[endpoint 1]") and "rank 1 did not start" in line for line in lines)
    assert any("the endpoint of rank 1 is gone" in line for line in lines)

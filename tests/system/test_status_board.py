"""`gateway status` in a real terminal (tmux) with real keys, against a real server."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.system

DEADLINE_S = 120.0
PROMPT = "ready> "
# What a shell's terminal must be again: lines are edited, typing shows, ctrl-S and ctrl-Z work.
SETTINGS = "stty -a | tr -d ';' | tr ' ' '\\n' | grep -x -e icanon -e echo -e ixon -e isig | sort | xargs"
RESTORED = "echo icanon isig ixon"


class Screen:
    """One window of a tmux server of its own, with a shell in it."""

    def __init__(self, tmux: str, directory: Path) -> None:
        self._num_checks = 0
        self._command = [tmux, "-u", "-S", str(directory / f"tmux-{uuid.uuid4().hex[:8]}"), "-f", "/dev/null"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "TERM": "xterm-256color"}
        environment.pop("TMUX", None)
        shell = "bash --norc --noprofile -i"
        subprocess.run(
            [*self._command, "new-session", "-d", "-x", "80", "-y", "24", shell], env=environment, cwd=ROOT, check=True
        )
        self.type(f"PS1='{PROMPT}'; clear")
        self.until(lambda text: text.rstrip() == PROMPT.strip(), "a prompt")

    def _tmux(self, *words: str) -> str:
        return subprocess.run([*self._command, *words], capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout

    def keys(self, *keys: str) -> None:
        """By tmux's names of them."""
        self._tmux("send-keys", *keys)

    def type(self, line: str) -> None:
        self._tmux("send-keys", "-l", line)
        self.keys("Enter")

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        """Polls for a screen that stays."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            text = self.text()
            if condition(text):
                return text
            time.sleep(0.05)
        raise AssertionError(f"{what} was not on the screen within {DEADLINE_S:g} s:\n{text}")

    def until_has(self, *words: str) -> str:
        return self.until(lambda text: all(word in text for word in words), " and ".join(words))

    def until_lacks(self, word: str) -> str:
        return self.until(lambda text: word not in text, f"no {word}")

    def shell_pid(self) -> int:
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def board_process(self) -> psutil.Process:
        return next(p for p in psutil.Process(self.shell_pid()).children(recursive=True) if "gateway" in p.cmdline())

    def check_restored(self, code: int | None = None) -> None:
        """The shell is back with its terminal as it was, and the board's exit code was this."""
        self.until(lambda text: text.rstrip().endswith(PROMPT.strip()), "the prompt")
        self._num_checks += 1  # an answer must not pass for the next one's
        self.type(f'echo "answer {self._num_checks}: $?, $({SETTINGS})"')
        text = self.until(lambda text: any(self._answer(line) for line in text.splitlines()), "the answer")
        (answer,) = filter(None, map(self._answer, text.splitlines()))
        found_code, _, settings = answer.partition(", ")
        assert settings == RESTORED
        assert code in (None, int(found_code))

    def _answer(self, line: str) -> str:
        start = f"answer {self._num_checks}: "
        return line.removeprefix(start).strip() if line.startswith(start) else ""

    def close(self) -> None:
        subprocess.run([*self._command, "kill-server"], capture_output=True, check=False, timeout=DEADLINE_S)


@pytest.fixture
def screen(program: Callable[[str], str], tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(program("tmux"), tmp_path)
    yield screen
    screen.close()


def command(url: str, *words: str) -> str:
    return shlex.join([sys.executable, "-m", "gateway", "status", "--url", url, *words])


def test_a_viewer_looks_around(screen: Screen, serve: Any, simulated: list[str]) -> None:
    server = serve(*simulated, "-dp", "3")
    screen.type(command(server.url))
    screen.until_has("3/3 ready", "sort: trouble")
    screen.keys("s")
    screen.until_has("sort: rank")
    screen.keys("j", "Down")
    screen.until(lambda text: any(line.startswith("▶  1 ready") for line in text.splitlines()), "rank 1, marked")
    screen.keys("Enter")
    screen.until_has("rank 1 ready", "epoch 1", "prefill tok/s", "its events")
    screen.keys("Escape")
    screen.until_has("rank state", "▶  1 ready")
    screen.keys("?")
    screen.until_has("with the exit code of")
    screen.keys("?")
    screen.until_has("rank state")

    os.kill(server.rank(1)["pid"], signal.SIGKILL)
    screen.until_has("death   rank 1", "restart rank 1", "3/3 ready")
    screen.resize(120, 40)
    screen.until_has("last death", "killed by signal 9")
    screen.keys("e")
    screen.until_has("j/k scroll", "death   rank 1")
    screen.keys("Escape", "p")
    screen.until_has("PAUSED, as of", "p go on")
    screen.keys("p")
    screen.until_lacks("PAUSED")
    screen.resize(40, 10)
    screen.until(lambda text: "q quit" in text.splitlines()[9], "the last line of a small window")

    screen.keys("C-z")
    screen.check_restored()
    screen.type("fg")
    screen.until_has("rank state")
    screen.keys("q")
    screen.check_restored(0)


def test_the_terminal_is_restored_whatever_ends_the_board(screen: Screen, serve: Any, simulated: list[str]) -> None:
    server = serve(*simulated)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 0), (signal.SIGHUP, 129)):
        screen.type(command(server.url))
        screen.until_has("1/1 ready")
        screen.board_process().send_signal(number)
        screen.check_restored(code)
    screen.type(command(server.url))
    screen.until_has("1/1 ready")
    screen.keys("C-c")
    screen.check_restored(0)


def test_the_board_outlives_its_server_and_finds_the_next_one(
    screen: Screen, serve: Any, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    port = str(port_range(1))
    server = serve(*simulated, "--port", port)
    screen.type(command(server.url))
    screen.until_has("1/1 ready")
    server.stop()
    screen.until_has("unreachable", "0 ready")  # the last view is kept
    screen.resize(120, 24)
    screen.until(lambda text: "seen " in text.splitlines()[0] and "trying" in text.splitlines()[0], "its age")
    serve(*simulated, "--port", port)
    screen.until_has("1/1 ready", "connection lost, back since")
    screen.keys("q")
    screen.check_restored(0)
    screen.type(command("http://127.0.0.1:1"))
    screen.until_has("unreachable", "never seen")
    screen.keys("q")
    screen.check_restored(2)


def test_a_start_shows_how_far_it_is_on_a_terminal(screen: Screen, simulated: list[str]) -> None:
    words = [sys.executable, "-m", "gateway", "serve", *simulated, "fault=stall_at_step=0", "-dp", "2", "--port", "0"]
    screen.type("clear; " + shlex.join(words))
    screen.until(lambda text: "rank 0 (epoch 1) on " in text and "starting tiny  0/2 ranks ready" in text, "its progress")
    lines = screen.text().rstrip().splitlines()
    assert lines[-1].startswith("starting tiny  0/2 ranks ready"), "log lines stand above it"
    screen.keys("C-c")
    screen.check_restored(0)
    assert not any(line.startswith("starting tiny") for line in screen.text().splitlines())

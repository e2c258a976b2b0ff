"""Real servers: `gateway serve` as a user starts it, watched by psutil so that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from cores.testing import make_tiny_model_dir

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Polls until `condition()` is true and returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not in {timeout_s} s: {what}")


class Server:
    """One `gateway serve` and all that it started."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, ready_lines: int = 1) -> None:
        command = [sys.executable, "-m", "gateway", "serve", *args]
        if "--port" not in args and "--uds" not in args:
            command += ["--port", "0"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | (env or {})
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.stderr: list[str] = []
        self._stdout: queue.Queue[str | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read_stdout, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._seen: dict[int, psutil.Process] = {}
        try:
            self.ready_lines = [self._next_line() for _ in range(ready_lines)]
        except BaseException:
            self.stop()
            raise
        self.urls = sorted(line.removeprefix("gateway ready: ").split()[0] for line in self.ready_lines)
        self.descendants()

    @property
    def url(self) -> str:
        return self.urls[0]

    def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._stdout.put(line)
        self._stdout.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self.stderr.extend(self.process.stderr)

    def _next_line(self) -> str:
        line = self._stdout.get(timeout=START_TIMEOUT_S)
        if line is None:
            raise AssertionError("the server ended before it was ready:\n" + "".join(self.stderr[-30:]))
        return line

    def get(self, path: str, url: str | None = None) -> requests.Response:
        return requests.get((url or self.url) + path, timeout=10)

    def status(self, url: str | None = None) -> dict[str, Any]:
        return self.get("/status", url).json()

    def rank(self, rank: int) -> dict[str, Any]:
        return next(row for row in self.status()["ranks"] if row["rank"] == rank)

    def is_idle(self) -> bool:
        status = self.status()
        return all(row["waiting"] == row["running"] == row["ledger_tokens"] == 0 for row in status["ranks"]) and all(
            front_end["in_flight"] == 0 for front_end in status["front_ends"]
        )

    def descendants(self) -> list[psutil.Process]:
        """All processes that it ever started, as far as they were seen."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen |= {process.pid: process for process in found}
        return list(self._seen.values())

    def alive(self) -> list[str]:
        return [
            " ".join(p.cmdline())[:120] for p in self.descendants() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            wait_for(lambda: not self.alive(), f"an end of {self.alive()}")
            for thread in self._threads:
                thread.join(STOP_TIMEOUT_S)
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers, and ends them after the test without leaving a process."""
    with ExitStack() as stack:

        def start(*args: str, **kwargs: Any) -> Server:
            server = Server(*args, **kwargs)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory without weights, for the simulated engine."""
    return str(make_tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny", max_model_len=8192))


@pytest.fixture(scope="session")
def simulated(tiny_model: str) -> list[str]:
    """Arguments of a server with simulated engines as local processes."""
    return [tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "--simulated", "step_ms=2"]


@pytest.fixture
def port_range() -> Callable[[int], int]:
    """The first of so many consecutive ports that were free a moment ago. Only for flags that cannot say 0."""

    def find(length: int) -> int:
        while True:
            with ExitStack() as stack:
                first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                with contextlib.suppress(OSError):
                    for port in range(first + 1, first + length):
                        stack.enter_context(socket.create_server(("127.0.0.1", port)))
                    return int(first)

    return find


@pytest.fixture
def poll() -> Callable[..., Any]:
    return wait_for

"""Real servers: `gateway serve` as a user starts it, watched by psutil so that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import queue
import random
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
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 90.0  # for what takes a second on a quiet machine
# Of a step, where a test arranges something while requests run: none of 400 tokens ends within a minute.
SLOW_MS = 200
# Below the ports that the kernel gives to clients and to whoever asks for any: nobody takes one of these by chance.
FIRST_PORT, NUM_PORTS_PER_WORKER = 12_000, 1_000


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Polls until `condition()` is true and returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not in {timeout_s} s: {what}")


class Server:
    """One `gateway serve` and all that it started."""

    def __init__(
        self, *args: str, env: dict[str, str] | None = None, ready_lines: int = 1, python: str = sys.executable
    ) -> None:
        command = [python, "-m", "gateway", "serve", *args]
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

    def rest_of_stdout(self) -> list[str]:
        """All behind the ready lines, once the server has ended."""
        return list(iter(self._stdout.get, None))

    def get(self, path: str, url: str | None = None) -> requests.Response:
        return requests.get((url or self.url) + path, timeout=ANSWER_TIMEOUT_S)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """No rank gets on in here: what the test arranges meanwhile lasts, however slow or fast the machine is."""
        pids = [row["pid"] for row in self.status()["ranks"] if row["pid"]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def set_step_ms(self, step_ms: float) -> None:
        """Of all simulated ranks that live; for a server with `--dev-mode`."""
        body = {"method": "set_step_ms", "args": [step_ms]}
        answer = requests.post(f"{self.url}/collective_rpc", json=body, timeout=ANSWER_TIMEOUT_S)
        assert answer.status_code == 200, answer.text

    def num_in_flight(self) -> int:
        return sum(front_end["in_flight"] for front_end in self.status()["front_ends"])

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
    """Arguments of a server with simulated engines as local processes; more of the cost model may follow."""
    return [tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "--simulated", "step_ms=2"]


@pytest.fixture(scope="session")
def slow_simulated(simulated: list[str]) -> list[str]:
    """Requests do not end before the test lets them: by `Server.set_step_ms`."""
    return [*simulated, f"step_ms={SLOW_MS}", "--dev-mode"]


@pytest.fixture(scope="session")
def port_range() -> Callable[[int], int]:
    """The first of so many consecutive ports that are free. Only for flags that cannot say 0. Gives no port twice."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    candidates = iter(range(FIRST_PORT + worker * NUM_PORTS_PER_WORKER + random.randrange(NUM_PORTS_PER_WORKER // 2), 65536))

    def find(length: int) -> int:
        found: list[int] = []
        for port in candidates:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                found = [*found, port] if found and found[-1] == port - 1 else [port]
                if len(found) == length:
                    return found[0]
        raise AssertionError("no port is free")

    return find


@pytest.fixture
def poll() -> Callable[..., Any]:
    return wait_for

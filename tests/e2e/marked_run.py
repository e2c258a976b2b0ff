"""`gateway serve` in processes that all carry a mark, so that none can be left behind unseen."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 240.0  # the slowest of these took 75 s on a machine with four times as much work as cores


def poll_until(condition: Callable[[], Any], what: str, timeout_s: float = END_TIMEOUT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


class MarkedRun:
    """One command and everything that it starts: processes by a mark in their environment, files by their directory."""

    def __init__(self, temp_dir: Path) -> None:
        self.temp_dir = temp_dir
        self._mark = uuid.uuid4().hex
        self._log = temp_dir.with_suffix(".log")
        self._seen: set[psutil.Process] = set()
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temp_dir), "GATEWAY_TEST_MARK": self._mark}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """To its end."""
        command = [sys.executable, "-m", "gateway", "serve", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env=self._environment, cwd=ROOT, timeout=END_TIMEOUT_S, check=False
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """In the background; what it says is in `log`."""
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "gateway", "serve", *words]
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, cwd=ROOT))
        return self._started[-1]

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def until_log_has(self, text: str, times: int = 1) -> None:
        def look() -> bool:
            ended = self._started[-1].poll() is not None
            found = self.log().count(text) >= times
            assert found or not ended, f"it ended with code {self._started[-1].returncode} before {text!r} was in the log"
            return found

        poll_until(look, f"{text!r} in the log")

    def urls(self, num_endpoints: int) -> list[str]:
        """Of all endpoints, once they are ready, in the order in which they were."""
        self.until_log_has("gateway ready: ", num_endpoints)
        return [text.split()[0] for text in self.log().split("gateway ready: ")[1:]]

    @property
    def url(self) -> str:
        return self.urls(1)[0]

    def see(self) -> set[psutil.Process]:
        """Remembers what there is now: Ray's processes write their title over their environment, mark and all."""
        for started in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen |= set(psutil.Process(started.pid).children(recursive=True))
        return self._seen

    def processes(self) -> list[psutil.Process]:
        """Alive, and marked or seen before."""
        marked = {process for process in psutil.process_iter() if self._is_marked(process)}
        return [process for process in marked | self._seen if _is_alive(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("GATEWAY_TEST_MARK") == self._mark
        except psutil.Error:
            return False

    def leftovers(self) -> list[str]:
        found = [str(path) for path in self.temp_dir.iterdir()]
        for process in self.processes():
            try:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return found

    def clean_up(self) -> None:
        print(self.log()[-10_000:])  # pytest shows it when the test has failed
        for process in self.processes():
            process.kill()
        for started in self._started:
            started.wait(END_TIMEOUT_S)
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        self._log.unlink(missing_ok=True)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def marked_run() -> Iterator[MarkedRun]:
    # Not pytest's directory: its paths are longer than a Unix socket's may be.
    run = MarkedRun(Path(tempfile.mkdtemp(prefix="gw-", dir="/tmp")))
    try:
        yield run
    finally:
        run.clean_up()

"""`gateway serve` with simulated ranks and clients that check every answer: what soak and chaos have in common.

Whatever becomes of the script, no server outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from cores.testing import make_tiny_model_dir
from scripts.checked_load import Client, Expected, Tally

ROOT = Path(__file__).resolve().parent.parent
END_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CheckedServer:
    url: str
    pid: int  # of the launcher


@contextlib.contextmanager
def checked_server(
    tally: Tally, num_ranks: int, step_ms: float, *flags: str, is_fault: Callable[[str], bool]
) -> Iterator[CheckedServer]:
    """In the end its exit code, what it leaves running and its log are checked: `is_fault` says which lines should not be."""
    with TemporaryDirectory() as directory:
        log_path = Path(directory) / "log"
        with log_path.open("w") as log, _started(directory, log.fileno(), num_ranks, step_ms, *flags) as process:
            assert process.stdout is not None
            ready_line = process.stdout.readline()
            if not ready_line:
                raise SystemExit(f"the server does not start:\n{log_path.read_text()}")
            yield CheckedServer(ready_line.removeprefix("gateway ready: ").split()[0], process.pid)
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            tally.check("server", "exit code", process.wait(END_TIMEOUT_S), 0)
            tally.faults += [f"left running: {child}" for child in children if child.is_running()]
        tally.faults += [f"log: {line.strip()}" for line in log_path.read_text().splitlines() if is_fault(line)]


@contextlib.contextmanager
def _started(directory: str, log: int, num_ranks: int, step_ms: float, *flags: str) -> Iterator[subprocess.Popen[str]]:
    model = make_tiny_model_dir(Path(directory) / "tiny", max_model_len=4096)
    command = [
        sys.executable, "-m", "gateway", "serve", str(model), "--engine", "simulated", "--simulated", f"step_ms={step_ms:g}",
        "--data-parallel-backend", "mp", "-dp", str(num_ranks), "--port", "0", *flags,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()  # its children end with it


def start_clients(url: str, number: int, rng: random.Random, pool: list[Expected], tally: Tally, until_s: float) -> Clients:
    clients = [Client(url, random.Random(rng.random()), pool, tally) for _ in range(number)]
    return Clients([asyncio.create_task(client.run(until_s)) for client in clients], tally)


@dataclass(frozen=True)
class Clients:
    tasks: list[asyncio.Task[None]]
    tally: Tally

    async def wait(self) -> None:
        """Until all have stopped; one that failed is a fault."""
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tally.faults += [f"a client failed: {end!r}" for end in ends if isinstance(end, BaseException)]


def verdict(tally: Tally) -> int:
    """Prints the faults. The exit code."""
    print(f"{len(tally.faults)} faults")
    print(*tally.faults[:20], sep="\n")
    return 1 if tally.faults else 0

"""Servers to measure: ours and vLLM's, started as the processes that a user would start, with what they cost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
# Of whatever server: processes of the engine, which are not its front end.
ENGINE_PROCESSES = ("cores.engine_core_proc", "EngineCore", "Worker", "Coordinator", "resource_tracker")


class ServerError(Exception):
    """A server that did not start."""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    port: int
    process: subprocess.Popen[bytes]

    def front_end_cpu_s(self) -> float:
        """User and system time of all its processes but the engine's, since their start."""
        return sum(times.user + times.system for process in self._front_end() for times in [process.cpu_times()])

    def front_end_rss_mib(self) -> float:
        return sum(process.memory_info().rss for process in self._front_end()) / 2**20

    def _front_end(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [process for process in (root, *root.children(recursive=True)) if not _is_engine(process)]


def _is_engine(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return any(name in command for name in ENGINE_PROCESSES)


@contextlib.contextmanager
def running(name: str, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Yields it once `/health` says 200. Raises `ServerError` with the end of its log."""
    with tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        server = Server(name, port, process)
        try:
            _wait_until_healthy(server, Path(log.name))
            yield server
        finally:
            _stop(process)


def _wait_until_healthy(server: Server, log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.process.poll() is not None:
            raise ServerError(f"{server.name} ended with {server.process.returncode}:\n{log.read_text()[-2000:]}")
        if _is_healthy(server):
            return
        time.sleep(0.2)
    raise ServerError(f"{server.name} was not ready after {READY_TIMEOUT_S:.0f} s:\n{log.read_text()[-2000:]}")


def _is_healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, then by force: nothing of it may disturb the next measurement."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()


def end_in_order_on_sigterm() -> None:
    """Else the servers, which have sessions of their own, would outlive us."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# --- ours ---------------------------------------------------------------------------------------------------------------


def gateway(name: str, model: str, *flags: str) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", model, "--port", str(port), "--data-parallel-backend", "mp"]
    return running(name, [*command, "--served-model-name", "model", *flags], port)


def model_directory() -> str:
    """Of the demo model."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "models", "path", "smollm2"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        raise SystemExit(f"the demo model is missing; run: gateway models pull smollm2 ({done.stderr.strip()})")
    return done.stdout.strip()


# --- vLLM's -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peers:
    """Where they are installed (`PEERS`): `vllm/bin/vllm`, vLLM's CPU build in an environment of its own, and `vllm-rs`, its
    Rust front end. None of it is needed to build or test this project."""

    directory: Path | None

    @classmethod
    def from_environment(cls) -> Peers:
        directory = os.environ.get("PEERS")
        return cls(Path(directory) if directory else None)

    @property
    def has_vllm(self) -> bool:
        return self.directory is not None and (self.directory / "vllm/bin/vllm").is_file()

    @property
    def has_rust_front_end(self) -> bool:
        return self.has_vllm and self.directory is not None and (self.directory / "vllm-rs").is_file()

    def vllm(
        self, name: str, model: str, *flags: str, environment: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Server]:
        assert self.directory is not None
        port = free_port()
        command = [str(self.directory / "vllm/bin/vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        return running(
            name, [*command, "--served-model-name", "model", *flags], port, {**self._environment(), **(environment or {})}
        )

    def rust_environment(self) -> dict[str, str]:
        return {
            "VLLM_USE_RUST_FRONTEND": "1",
            "VLLM_RUST_FRONTEND_PATH": str(self.directory / "vllm-rs" if self.directory else ""),
        }

    def _environment(self) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # All cores compute. By default it keeps one free, which on a small machine is half of it.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": f"{self.directory}/vllm_cache",
            "TORCHINDUCTOR_CACHE_DIR": f"{self.directory}/inductor",
        }

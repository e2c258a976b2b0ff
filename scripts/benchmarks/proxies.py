"""Real proxies with the configurations that we ship, for tests and benchmarks. Nothing is changed but addresses and paths."""

from __future__ import annotations

import contextlib
import csv
import getpass
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED_PORTS = (8000, 8001, 8002, 8003)
FIRST_EPHEMERAL_PORT = 32_768  # Linux's
DEADLINE_S = 60.0
# Beside this Python, where wheels put programs; then where everybody looks; then where Debian has servers.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find_program(name: str) -> str | None:
    return shutil.which(name, path=SEARCH_PATH)


@dataclass
class Proxy:
    """One running proxy in front of four endpoints."""

    directory: Path
    port: int
    admin_port: int
    process: subprocess.Popen[bytes] | None = None

    program: ClassVar[str]
    config_file: ClassVar[str]
    probes: ClassVar[bool] = True  # asks endpoints by itself whether they are ready

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config_path(self) -> Path:
        return self.directory / self.config_file

    def replacements(self) -> dict[str, str]:
        """What stands in the shipped file, and what stands there here instead."""
        raise NotImplementedError

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def endpoints_up(self) -> set[int]:
        """The endpoints that get requests, as far as the proxy's own active checks decide."""
        raise NotImplementedError

    def configure(self, endpoint_ports: Sequence[int], others: Mapping[str, str]) -> None:
        text = (CONFIGS / self.config_file).read_text()
        for shipped, ours in (self.replacements() | self._addresses(endpoint_ports) | dict(others)).items():
            assert shipped in text, f"{self.config_file} has no {shipped!r}"
            text = text.replace(shipped, ours)
        self.config_path.write_text(text)

    def _addresses(self, endpoint_ports: Sequence[int]) -> dict[str, str]:
        return {
            f"127.0.0.1:{shipped}": f"127.0.0.1:{port}" for shipped, port in zip(SHIPPED_PORTS, endpoint_ports, strict=True)
        }

    def start(self, program: str) -> None:
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen([program, *self.arguments()], stdout=log, stderr=log)
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        self.stop()
        raise AssertionError(f"{self.program} did not start:\n" + (self.directory / "log").read_text())

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()


class Nginx(Proxy):
    program = "nginx"
    config_file = "nginx.conf"
    probes = False

    def replacements(self) -> dict[str, str]:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        own_directories = "".join(f"{kind}_temp_path {self.directory}/{kind};" for kind in kinds)
        return {
            "listen 8080;": f"listen 127.0.0.1:{self.port};",
            "/run/nginx-gateway.pid": f"{self.directory}/pid",
            "http {": "http { " + own_directories,
            "worker_processes auto;": f"worker_processes auto; user {getpass.getuser()};",  # who may use them
        }

    def arguments(self) -> list[str]:
        return ["-e", "stderr", "-p", str(self.directory), "-c", str(self.config_path), "-g", "daemon off;"]


class HAProxy(Proxy):
    program = "haproxy"
    config_file = "haproxy.cfg"

    @property
    def _socket(self) -> str:
        return str(self.directory / "stats")

    def replacements(self) -> dict[str, str]:
        own_sockets = {"/run/haproxy-gateway.sock": self._socket, "/run/haproxy-gateway-nobody.sock": f"{self._socket}-nobody"}
        return {"bind :8080": f"bind 127.0.0.1:{self.port}", **own_sockets}

    def arguments(self) -> list[str]:
        return ["-W", "-f", str(self.config_path)]

    def endpoints_up(self) -> set[int]:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(self._socket)
            except FileNotFoundError:  # made after the port that clients use
                return set()
            connection.sendall(b"show stat\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        rows = csv.DictReader(answer.removeprefix("# ").splitlines())
        servers = [row for row in rows if row["svname"].startswith("endpoint")]
        # Before its first check a server is taken for up; with a failed one ("UP 1/2") it still is.
        return {int(row["svname"][-1]) for row in servers if row["status"].startswith("UP") and row["check_status"] != "INI"}


class Envoy(Proxy):
    program = "envoy"
    config_file = "envoy.yaml"

    def replacements(self) -> dict[str, str]:
        return {
            "address: 0.0.0.0, port_value: 8080": f"address: 127.0.0.1, port_value: {self.port}",
            "port_value: 9901": f"port_value: {self.admin_port}",
        }

    def _addresses(self, endpoint_ports: Sequence[int]) -> dict[str, str]:
        self._ports = list(endpoint_ports)
        return {
            f"port_value: {shipped}": f"port_value: {port}" for shipped, port in zip(SHIPPED_PORTS, endpoint_ports, strict=True)
        }

    def arguments(self) -> list[str]:
        return ["-c", str(self.config_path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]

    def endpoints_up(self) -> set[int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/clusters?format=json", timeout=DEADLINE_S) as answer:
            clusters = json.load(answer)["cluster_statuses"]
        up = [
            {
                self._ports.index(host["address"]["socket_address"]["port_value"])
                for host in cluster["host_statuses"]
                if not host["health_status"].get("failed_active_health_check")
            }
            for cluster in clusters
        ]
        return set.intersection(*up)


PROXIES: dict[str, type[Proxy]] = {proxy.program: proxy for proxy in (Nginx, HAProxy, Envoy)}


@contextlib.contextmanager
def running_proxy(
    name: str,
    path: str,
    endpoint_ports: Sequence[int],
    directory: Path,
    port: int,
    replacements: Mapping[str, str] | None = None,
) -> Iterator[Proxy]:
    """The program at `path` in front of four ports. It listens on `port`, and may use the next one."""
    proxy = PROXIES[name](directory, port, port + 1)
    proxy.configure(endpoint_ports, replacements or {})
    proxy.start(path)
    try:
        yield proxy
    finally:
        proxy.stop()


def free_ports(number: int) -> int:
    """The first of so many consecutive ports that were free a moment ago, for programs that must be told theirs. Not among
    those that the kernel gives to outgoing connections, one of which could have it by now."""
    while True:
        first = random.SystemRandom().randrange(20_000, FIRST_EPHEMERAL_PORT - number)
        with ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first

"""Real servers beside real programs of other people. Where a program is not installed, its tests are skipped."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import poll, port_range, serve, simulated, tiny_model
from tests.system.proxies import PROXIES, Proxy, free_ports

__all__ = ["poll", "port_range", "serve", "simulated", "tiny_model"]  # fixtures
# Beside this Python, where wheels put programs; then where everybody looks; then where Debian has servers.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Finds a program, or skips the test."""

    def find(name: str) -> str:
        path = shutil.which(name, path=SEARCH_PATH)
        if path is None:
            pytest.skip(f"{name} is not installed; `./scripts/test --system` installs it where it can")
        return path

    return find


@pytest.fixture
def start_proxy(program: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[[str, Sequence[int]], Proxy]]:
    """Starts a proxy by its program's name in front of four ports."""
    with ExitStack() as stack:

        def start(name: str, endpoint_ports: Sequence[int]) -> Proxy:
            path = program(name)
            directory = tmp_path / name
            directory.mkdir()
            proxy = PROXIES[name](directory, *free_ports(2))
            proxy.configure(endpoint_ports)
            proxy.start(path)
            stack.callback(proxy.stop)
            return proxy

        yield start

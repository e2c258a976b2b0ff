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
from tests.system.proxies import Proxy, running_proxy

__all__ = ["poll", "port_range", "serve", "simulated", "tiny_model"]  # fixtures
# Beside this Python, where wheels put programs; then where everybody looks; then where Debian has servers.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


FindProgram = Callable[[str], str | None]


@pytest.fixture(scope="session")
def find_program() -> FindProgram:
    return lambda name: shutil.which(name, path=SEARCH_PATH)


@pytest.fixture(scope="session")
def program(find_program: FindProgram) -> Callable[[str], str]:
    """Finds a program, or skips the test."""

    def find(name: str) -> str:
        path = find_program(name)
        if path is None:
            pytest.skip(f"{name} is not installed; `./scripts/test --system` installs it where it can")
        return path

    return find


@pytest.fixture
def start_proxy(program: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[[str, Sequence[int]], Proxy]]:
    """Starts a proxy by its program's name in front of four ports."""
    with ExitStack() as stack:

        def start(name: str, endpoint_ports: Sequence[int]) -> Proxy:
            path, directory = program(name), tmp_path / name
            directory.mkdir()
            return stack.enter_context(running_proxy(name, path, endpoint_ports, directory))

        yield start

"""Real servers beside real programs of other people. Where a program is not installed, its tests are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.benchmarks.proxies import Proxy, find_program, running_proxy
from tests.e2e.conftest import poll, port_range, serve, simulated, slow_simulated, tiny_model

__all__ = ["poll", "port_range", "serve", "simulated", "slow_simulated", "tiny_model"]  # fixtures


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Finds a program, or skips the test."""

    def find(name: str) -> str:
        path = find_program(name)
        if path is None:
            pytest.skip(f"{name} is not installed; `./scripts/test --system` installs it where it can")
        return path

    return find


@pytest.fixture
def start_proxy(
    program: Callable[[str], str], port_range: Callable[[int], int], tmp_path: Path
) -> Iterator[Callable[..., Proxy]]:
    """Starts a proxy by its program's name in front of four ports, perhaps with something replaced in its configuration."""
    with ExitStack() as stack:

        def start(name: str, endpoint_ports: Sequence[int], replacements: Mapping[str, str] | None = None) -> Proxy:
            path, directory = program(name), tmp_path / name
            directory.mkdir()
            return stack.enter_context(running_proxy(name, path, endpoint_ports, directory, port_range(2), replacements))

        yield start

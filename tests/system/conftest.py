"""Real servers beside real programs of other people. Where a program is not installed, its tests are skipped."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import poll, port_range, serve, simulated, tiny_model

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

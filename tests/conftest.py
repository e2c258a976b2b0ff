"""Options and fixtures for all tests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no limit on the wall-clock time that they take or that making them takes: a busy machine
# fails no test.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


# Tests with one of these markers run only with the option of its name.
OPTIONAL = {
    "long": "run the tests that take minutes, too",
    "system": "run the tests with programs that are not Python packages, too; one whose program is not installed is skipped",
    "peer": "run the tests with vLLM, too: GATEWAY_PEER_PYTHON names a Python that has it and what this package needs",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, text in OPTIONAL.items():
        parser.addoption(f"--{name}", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [name for name in OPTIONAL if not config.getoption(f"--{name}")]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


def pytest_collection_finish() -> None:
    """Ray reads its token when it is imported: a test file that imports it makes every later join of that process fail."""
    if "ray" in sys.modules:
        raise pytest.UsageError("a test file imports ray, or a module that does, at its top")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that was run in this process has set up its log on a stream that is gone with its test. The next one to log
    would print a traceback for it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from gateway.launch.open_files import raise_open_files_limit


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_soft_limit_of_a_usual_shell_does_not_bound_the_number_of_clients(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    assert raise_open_files_limit(1000) == 1000
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, hard)


def test_limit_is_never_lowered(limits: tuple[int, int]) -> None:
    soft, hard = limits
    assert raise_open_files_limit(16) == soft
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_hard_limit_is_kept(limits: tuple[int, int]) -> None:
    _, hard = limits
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is none here")
    assert raise_open_files_limit(hard + 1) == hard

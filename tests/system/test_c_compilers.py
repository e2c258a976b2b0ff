"""Our C is C for other compilers than today's GCC: those of older systems, and clang."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from cores.runner.cpu_kernels import SOURCE

pytestmark = pytest.mark.system


@pytest.mark.parametrize("compiler", ["gcc-11", "clang"])
def test_the_kernels_compile_where_vectors_are_shuffled_by_another_name(compiler: str, program: Callable[[str], str]) -> None:
    subprocess.run([program(compiler), "-fsyntax-only", "-std=gnu11", "-O1", str(SOURCE)], check=True, timeout=60)

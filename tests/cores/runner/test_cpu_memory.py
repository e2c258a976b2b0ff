"""Memory that a tensor gave back is used again, without a fault for each of its pages."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

# In a process of its own: the setting is the process's, and other tests' memory would blur the count.
COUNT_FAULTS = """
import resource, sys, torch
from cores.runner.cpu_memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.set_num_threads(1)
x = torch.ones(1024, 1024)  # 4 MiB, 1,024 pages

def step():
    y = x * x
    z = y + x
    return (z * y).mean()

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS, mode], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_tensor_does_not_fault_in_what_its_predecessor_had() -> None:
    num_pages = 20 * 3 * (4 << 20) // resource.getpagesize()  # of all tensors that were made
    assert count_faults("keep") < num_pages // 20

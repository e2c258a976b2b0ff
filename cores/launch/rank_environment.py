"""Which cores and which GPU a rank may use, as environment variables. Pure: the machine is an argument."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cores.launch.interface import LaunchError
from cores.words import counted


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share out."""

    num_cores: int
    num_gpus: int

    @classmethod
    def here(cls) -> Machine:
        # Counted by device files: asking CUDA would import torch and hold GPU memory in the launcher.
        gpus = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
        return cls(len(os.sched_getaffinity(0)), len(gpus))


def threads_per_rank(machine: Machine, num_local_ranks: int, environment: Mapping[str, str]) -> int:
    """Compute threads of one rank. Whoever sets OMP_NUM_THREADS knows better."""
    chosen = environment.get("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return max(1, machine.num_cores // num_local_ranks)


def thread_variables(machine: Machine, num_local_ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    threads = threads_per_rank(machine, num_local_ranks, environment)
    variables = {"OMP_NUM_THREADS": str(threads)}
    if num_local_ranks > 1 or threads * num_local_ranks > machine.num_cores:
        # OpenMP threads spin while they wait. Two engines of two threads on two cores took 6-8 s for a step of 55 ms,
        # each spinning while the other held the core that its partner needed.
        variables["OMP_WAIT_POLICY"] = environment.get("OMP_WAIT_POLICY", "passive")
    elif not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        # One engine has all cores, but the front end and whatever else runs want some of them for a moment. By default threads
        # spin for 10 ms: a step of 0.1 s then takes seconds on a machine with other work. Asleep after 0.1 ms, as they were
        # once, they are woken 200 times a step: 140 ms instead of 90. This is about 1 ms.
        variables["GOMP_SPINCOUNT"] = "20000"
    return variables


def memory_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Huge pages for what glibc's allocator hands out; it reads this when a process starts.

    A step reads all weights, and in pages of 4 kB most of that time went into address translation: SmolLM2's matrix products
    for 8 tokens took 39 ms with small pages and 20 ms with huge ones (two cores of a virtual machine).
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))}


def gpu_variables(
    machine: Machine, device: str, local_rank: int, num_local_ranks: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """One GPU for each local rank, or none for anybody. Raises `LaunchError` when there are some, but not enough."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(machine.num_gpus)] if visible is None else [gpu for gpu in visible.split(",") if gpu.strip()]
    if device == "auto" and not gpus:
        return {}
    if local_rank >= len(gpus):
        shown = ", ".join(gpus) or "none"
        need = counted(num_local_ranks, "rank on this machine needs a GPU", "ranks on this machine need a GPU each")
        raise LaunchError(f"{need}, visible: {shown}; or use --device cpu")
    return {"CUDA_VISIBLE_DEVICES": gpus[local_rank].strip()}

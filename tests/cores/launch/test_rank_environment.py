from __future__ import annotations

import pytest

from cores.launch.interface import LaunchError
from cores.launch.rank_environment import Machine, gpu_variables, memory_variables, thread_variables, threads_per_rank

SMALL = Machine(num_cores=2, num_gpus=0)
LARGE = Machine(num_cores=16, num_gpus=4)


@pytest.mark.parametrize(("machine", "num_ranks", "threads"), [(SMALL, 1, 2), (SMALL, 2, 1), (SMALL, 5, 1), (LARGE, 3, 5)])
def test_cores_are_shared_out_and_nobody_gets_less_than_one(machine: Machine, num_ranks: int, threads: int) -> None:
    assert threads_per_rank(machine, num_ranks, {}) == threads


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("", 2), ("0", 2), ("4,2", 2)])
def test_number_of_threads_that_the_user_set_is_kept(text: str, threads: int) -> None:
    assert threads_per_rank(SMALL, 1, {"OMP_NUM_THREADS": text}) == threads


def test_threads_wait_without_spinning_where_cores_are_shared() -> None:
    assert "OMP_WAIT_POLICY" not in thread_variables(SMALL, 1, {})
    assert thread_variables(SMALL, 2, {})["OMP_WAIT_POLICY"] == "passive"
    assert thread_variables(SMALL, 1, {"OMP_NUM_THREADS": "4"})["OMP_WAIT_POLICY"] == "passive"
    assert thread_variables(SMALL, 2, {"OMP_WAIT_POLICY": "active"})["OMP_WAIT_POLICY"] == "active"


def test_threads_of_the_only_engine_spin_for_a_moment_and_not_until_others_starve() -> None:
    assert thread_variables(SMALL, 1, {})["GOMP_SPINCOUNT"] == "20000"
    assert "GOMP_SPINCOUNT" not in thread_variables(SMALL, 1, {"OMP_WAIT_POLICY": "active"})
    assert "GOMP_SPINCOUNT" not in thread_variables(SMALL, 1, {"GOMP_SPINCOUNT": "5"})


def test_huge_pages_are_asked_for_beside_what_the_user_has_set() -> None:
    assert memory_variables({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert memory_variables({"GLIBC_TUNABLES": "a.b.c=2"}) == {"GLIBC_TUNABLES": "a.b.c=2:glibc.malloc.hugetlb=1"}
    assert memory_variables({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}


def test_each_local_rank_has_its_own_gpu() -> None:
    assert [gpu_variables(LARGE, "auto", i, 2, {}) for i in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]


def test_gpus_that_the_user_chose_are_shared_out() -> None:
    assert gpu_variables(LARGE, "cuda", 1, 2, {"CUDA_VISIBLE_DEVICES": "3,GPU-abc"}) == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}


def test_cpu_ranks_see_no_gpu_and_machines_without_one_are_left_alone() -> None:
    assert gpu_variables(LARGE, "cpu", 0, 1, {}) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpu_variables(SMALL, "auto", 0, 1, {}) == {}
    assert gpu_variables(LARGE, "auto", 0, 1, {"CUDA_VISIBLE_DEVICES": ""}) == {}


@pytest.mark.parametrize(("machine", "device", "shown"), [(LARGE, "auto", "0, 1, 2, 3"), (SMALL, "cuda", "none")])
def test_too_few_gpus_is_an_error_that_says_what_was_asked_and_what_there_is(machine: Machine, device: str, shown: str) -> None:
    with pytest.raises(LaunchError, match=f"5 ranks on this machine need a GPU each, visible: {shown}"):
        gpu_variables(machine, device, 4, 5, {})

"""`gateway serve` with engine cores as Ray actors, on a Ray of its own: serves, survives deaths, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from tests.e2e.marked_run import END_TIMEOUT_S, MarkedRun, marked_run, poll_until


@pytest.fixture
def marked() -> Iterator[MarkedRun]:
    with marked_run() as marked:
        yield marked


@pytest.fixture
def ray_serve(tiny_model: str) -> list[str]:
    return [tiny_model, "--engine", "simulated", "--port", "0", "-dp", "2"]


def num_completion_tokens(url: str, rank: int) -> int:
    answer = requests.post(
        f"{url}/v1/completions",
        json={"model": "tiny", "prompt": "one two", "max_tokens": 3, "ignore_eos": True},
        headers={"X-data-parallel-rank": str(rank)},
        timeout=END_TIMEOUT_S,
    )
    return int(answer.json()["usage"]["completion_tokens"])


def rank_row(url: str, rank: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = requests.get(f"{url}/status", timeout=END_TIMEOUT_S).json()["ranks"]
    return next(row for row in rows if row["rank"] == rank)


def test_two_ranks_serve_one_is_killed_and_comes_back_and_sigterm_leaves_nothing(
    marked: MarkedRun, ray_serve: list[str]
) -> None:
    serve = marked.start(*ray_serve)
    url = marked.url
    assert [num_completion_tokens(url, rank) for rank in (0, 1)] == [3, 3]
    marked.see()

    first_life = rank_row(url, 1)
    os.kill(first_life["pid"], signal.SIGKILL)
    assert num_completion_tokens(url, 0) == 3
    poll_until(lambda: (rank_row(url, 1)["state"], rank_row(url, 1)["epoch"]) == ("ready", 2), "its next life")
    assert f"process {first_life['pid']} was killed or crashed" in rank_row(url, 1)["death_cause"]
    assert num_completion_tokens(url, 1) == 3

    assert len(marked.see()) > 5
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_kill_9_of_the_launcher_takes_ray_with_it(marked: MarkedRun, ray_serve: list[str]) -> None:
    serve = marked.start(*ray_serve)
    assert num_completion_tokens(marked.url, 0) == 3
    assert len(marked.see()) > 5
    serve.kill()
    serve.wait(END_TIMEOUT_S)
    poll_until(lambda: not marked.processes(), "no process is left")


def test_kill_9_of_rays_guardian_leaves_no_process_of_ray_when_the_server_ends(marked: MarkedRun, ray_serve: list[str]) -> None:
    serve = marked.start(*ray_serve)
    assert num_completion_tokens(marked.url, 0) == 3
    (guardian,) = [process for process in marked.see() if "cores.launch.ray_cluster" in process.cmdline()]
    guardian.kill()
    assert num_completion_tokens(marked.url, 1) == 3
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_rank_that_dies_while_loading_ends_the_start_with_its_cause_last(marked: MarkedRun, ray_serve: list[str]) -> None:
    serve = marked.start(*ray_serve, "--simulated", "fault=raise_at_step=0@rank=1")
    marked.until_log_has("loading")
    marked.see()
    assert serve.wait(END_TIMEOUT_S) == 1
    assert marked.log().splitlines()[-1].endswith("SimulatedFaultError: simulated fault at step 0 of rank 1 (epoch 1)")
    assert "rank 1 did not start: SimulatedFaultError" in marked.log()
    assert marked.leftovers() == []


def test_signal_while_the_supervisor_starts_ray_ends_it_at_once_and_in_order(marked: MarkedRun, ray_serve: list[str]) -> None:
    serve = marked.start(*ray_serve, "--data-parallel-multi-port-external-lb")
    marked.until_log_has("starting Ray on this machine")
    serve.terminate()
    marked.see()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert "endpoint of rank 0 started" not in marked.log()
    poll_until(lambda: not marked.processes(), "no process is left")
    assert marked.leftovers() == []


def test_endpoints_under_one_supervisor_share_one_ray(
    marked: MarkedRun, ray_serve: list[str], port_range: Callable[[int], int]
) -> None:
    rpc_port = str(port_range(1))
    serve = marked.start(*ray_serve, "--data-parallel-multi-port-external-lb", "--data-parallel-rpc-port", rpc_port)
    by_rank = {requests.get(f"{url}/status", timeout=END_TIMEOUT_S).json()["ranks"][0]["rank"]: url for url in marked.urls(2)}
    assert [num_completion_tokens(by_rank[rank], rank) for rank in (0, 1)] == [3, 3]
    assert [process.name() for process in marked.see()].count("gcs_server") == 1
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


@pytest.mark.parametrize("headless_s", [0.0, pytest.param(70.0, marks=pytest.mark.long)])
def test_death_of_rays_head_ends_no_rank_and_is_said(marked: MarkedRun, ray_serve: list[str], headless_s: float) -> None:
    """Left alone, Ray's own code ends every process that has not reached the head for a minute."""
    serve = marked.start(*ray_serve)
    url = marked.url
    assert [num_completion_tokens(url, rank) for rank in (0, 1)] == [3, 3]
    (head,) = [process for process in marked.see() if process.name() == "gcs_server"]
    head.kill()
    killed_s = time.monotonic()
    marked.until_log_has("is gone: what runs goes on, no rank can be started")
    poll_until(lambda: time.monotonic() - killed_s > headless_s, "a cluster without a head")
    assert [num_completion_tokens(url, rank) for rank in (0, 1)] == [3, 3]

    # A rank that dies now cannot come back; the other serves on.
    os.kill(rank_row(url, 1)["pid"], signal.SIGKILL)
    poll_until(lambda: rank_row(url, 1)["deaths"] > 0, "its death is seen")
    assert num_completion_tokens(url, 0) == 3
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    poll_until(lambda: not marked.processes(), "no process is left")

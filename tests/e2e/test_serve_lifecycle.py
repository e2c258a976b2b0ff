"""The life of `gateway serve` over local processes: signals, deaths of each of its processes, and what is left afterwards."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.marked_run import END_TIMEOUT_S, MarkedRun, marked_run, poll_until


@pytest.fixture
def marked() -> Iterator[MarkedRun]:
    with marked_run() as marked:
        yield marked


def complete(url: str, max_tokens: int = 3) -> requests.Response:
    body = {"model": "tiny", "prompt": "one two", "max_tokens": max_tokens, "ignore_eos": True}
    return requests.post(f"{url}/v1/completions", json=body, timeout=END_TIMEOUT_S)


def ranks(url: str) -> list[dict[str, Any]]:
    document: dict[str, Any] = requests.get(f"{url}/status", timeout=END_TIMEOUT_S).json()
    rows: list[dict[str, Any]] = document["ranks"]
    return rows


def begin_endless_request(url: str) -> queue.Queue[requests.Response]:
    """A request that outlives the test, in flight when this returns. Where its answer will be, if there is one."""
    answers: queue.Queue[requests.Response] = queue.Queue()

    def ask() -> None:
        with contextlib.suppress(requests.RequestException):  # the server is ended under it
            answers.put(complete(url, max_tokens=8000))

    threading.Thread(target=ask, daemon=True).start()
    poll_until(lambda: any(row["running"] for row in ranks(url)), "the request runs")
    return answers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_it_with_code_0_and_leaves_nothing(
    marked: MarkedRun, simulated: list[str], number: signal.Signals
) -> None:
    serve = marked.start(*simulated, "-dp", "2", "--port", "0")
    assert complete(marked.url).status_code == 200
    serve.send_signal(number)
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_unix_socket_serves_and_its_file_is_removed(marked: MarkedRun, simulated: list[str]) -> None:
    path = marked.temp_dir / "socket"
    serve = marked.start(*simulated, "--uds", str(path))
    assert marked.url == f"unix:{path}"
    assert path.is_socket()
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_signal_while_ranks_are_loading_ends_it_with_code_0(marked: MarkedRun, simulated: list[str]) -> None:
    serve = marked.start(*simulated, "fault=stall_at_step=0", "-dp", "2", "--port", "0")
    marked.until_log_has("rank 0 (epoch 1) on ")
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_ranks_are_in_the_status_while_they_start(
    marked: MarkedRun, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    port = port_range(1)
    url = f"http://127.0.0.1:{port}"
    serve = marked.start(*simulated, "fault=stall_at_step=0", "-dp", "2", "--port", str(port))

    def starting() -> Any:
        try:
            document = requests.get(f"{url}/status", timeout=10).json()
        except requests.ConnectionError:
            return None
        return document if len(document["ranks"]) == 2 and all(row["pid"] for row in document["ranks"]) else None

    document = poll_until(starting, "both ranks have a process")
    assert document["state"] == "starting"
    assert [(row["rank"], row["epoch"], row["state"]) for row in document["ranks"]] == [(0, 1, "starting"), (1, 1, "starting")]
    assert requests.get(f"{url}/health", timeout=10).status_code == 503
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_signal_before_the_front_end_listens_does_not_wait_for_the_drain_timeout(
    marked: MarkedRun, simulated: list[str]
) -> None:
    serve = marked.start(*simulated, "--port", "0", "--shutdown-timeout", "10000")
    poll_until(lambda: psutil.Process(serve.pid).children(), "the front end's process exists")
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_second_signal_ends_the_drain_at_once(marked: MarkedRun, simulated: list[str]) -> None:
    serve = marked.start(*simulated, "step_ms=1000", "--port", "0", "--shutdown-timeout", "10000")
    begin_endless_request(marked.url)
    serve.terminate()
    marked.until_log_has("draining 1 request for")
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 128 + signal.SIGTERM
    assert marked.leftovers() == []


def test_with_a_shutdown_delay_new_requests_are_served_while_the_server_is_not_ready_any_more(
    marked: MarkedRun, simulated: list[str]
) -> None:
    serve = marked.start(*simulated, "--port", "0", "--shutdown-timeout", "10000", "--shutdown-delay", "9000")
    url = marked.url
    serve.terminate()
    marked.until_log_has("new requests are served for another 9000 s")
    assert requests.get(f"{url}/ready", timeout=END_TIMEOUT_S).status_code == 503
    answer = complete(url)
    assert (answer.status_code, answer.headers["Connection"]) == (200, "close")
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 128 + signal.SIGTERM
    assert marked.leftovers() == []


@pytest.mark.parametrize("timeout", ["0", "0.5"])
def test_drain_is_bounded_by_the_shutdown_timeout_and_what_is_left_is_answered(
    marked: MarkedRun, simulated: list[str], timeout: str
) -> None:
    serve = marked.start(*simulated, "step_ms=1000", "--port", "0", "--shutdown-timeout", timeout)
    answers = begin_endless_request(marked.url)
    serve.terminate()
    answer = answers.get(timeout=END_TIMEOUT_S)
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_kill_9_of_the_launcher_leaves_no_process_and_the_next_run_removes_its_directory(
    marked: MarkedRun, simulated: list[str]
) -> None:
    serve = marked.start(*simulated, "-dp", "2", "--port", "0")
    assert complete(marked.url).status_code == 200
    assert len(marked.processes()) == 4  # launcher, front end, two ranks
    serve.kill()
    serve.wait(END_TIMEOUT_S)
    poll_until(lambda: not marked.processes(), "no process is left")
    assert len(marked.leftovers()) == 1

    successor = marked.start(*simulated, "--port", "0")
    marked.until_log_has("gateway ready: ")
    successor.terminate()
    assert successor.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_killed_front_end_comes_back_on_its_port_and_the_ranks_live_on(marked: MarkedRun, simulated: list[str]) -> None:
    serve = marked.start(*simulated, "step_ms=50", "-dp", "2", "--port", "0", "--stall-timeout", "600")
    url = marked.url
    before = requests.get(f"{url}/status", timeout=END_TIMEOUT_S).json()
    begin_endless_request(url)
    os.kill(before["front_ends"][0]["pid"], signal.SIGKILL)

    def is_back() -> bool:
        try:
            return requests.get(f"{url}/ready", timeout=END_TIMEOUT_S).status_code == 200
        except requests.ConnectionError:
            return False

    poll_until(is_back, "the front end is back")
    after = requests.get(f"{url}/status", timeout=END_TIMEOUT_S).json()
    assert after["front_ends"][0]["pid"] != before["front_ends"][0]["pid"]
    assert after["uptime_s"] > before["uptime_s"]
    assert after["events"][-1]["text"] == "front end 0 has started again"
    assert [row["pid"] for row in after["ranks"]] == [row["pid"] for row in before["ranks"]]
    poll_until(lambda: [row["running"] for row in ranks(url)] == [0, 0], "what the dead front end had asked for is dropped")
    assert complete(url, max_tokens=7).json()["usage"]["completion_tokens"] == 7

    os.kill(before["ranks"][1]["pid"], signal.SIGSTOP)  # nobody knows of it
    os.kill(after["front_ends"][0]["pid"], signal.SIGKILL)

    def is_back_without_it() -> bool:
        return is_back() and [row["state"] for row in ranks(url)] == ["ready", "suspect"]

    poll_until(is_back_without_it, "the front end is back and has not waited for the stopped rank")
    assert complete(url, max_tokens=7).json()["usage"]["completion_tokens"] == 7
    os.kill(before["ranks"][1]["pid"], signal.SIGCONT)
    poll_until(lambda: [row["state"] for row in ranks(url)] == ["ready", "ready"], "the rank that went on is taken in")
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_rank_without_restarts_left_stays_dead_and_the_other_serves(marked: MarkedRun, simulated: list[str]) -> None:
    serve = marked.start(*simulated, "-dp", "2", "--port", "0", "--engine-restarts", "1")
    url = marked.url
    for epoch in (1, 2):
        poll_until(lambda epoch=epoch: (ranks(url)[1]["state"], ranks(url)[1]["epoch"]) == ("ready", epoch), "rank 1 is ready")
        os.kill(ranks(url)[1]["pid"], signal.SIGKILL)
    marked.until_log_has("rank 1 (epoch 2) died and stays dead")
    assert complete(url).status_code == 200
    assert requests.get(f"{url}/health", timeout=END_TIMEOUT_S).status_code == 200
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0


def test_dying_rank_that_has_no_successor_ends_the_server_with_its_cause_as_last_line(
    marked: MarkedRun, simulated: list[str]
) -> None:
    serve = marked.start(*simulated, "--port", "0", "--engine-restarts", "0")
    pid = ranks(marked.url)[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert serve.wait(END_TIMEOUT_S) == 1
    last = marked.log().splitlines()[-1]
    assert last.endswith(f"no rank is left; rank 0 was the last to die: process {pid} was killed by signal 9 (SIGKILL)")
    assert marked.leftovers() == []


def test_coordinator_is_restarted_and_serving_does_not_depend_on_it(
    marked: MarkedRun, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    serve = marked.start(
        *simulated, "-dp", "2", "--data-parallel-external-lb", "--data-parallel-rank", "0", "--port", "0",
        "--data-parallel-rpc-port", str(port_range(1)),
    )  # fmt: skip
    url = marked.url
    coordinators = [p for p in marked.processes() if "balancer.coordinator" in p.cmdline()]
    assert len(coordinators) == 1
    coordinators[0].kill()
    assert complete(url).status_code == 200
    poll_until(
        lambda: [p for p in marked.processes() if "balancer.coordinator" in p.cmdline() and p != coordinators[0]],
        "the coordinator is back",
    )
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_supervisor_passes_on_ready_lines_reports_a_dead_endpoint_and_ends_all(
    marked: MarkedRun, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    serve = marked.start(
        *simulated, "-dp", "2", "--data-parallel-multi-port-external-lb", "--port", "0",
        "--data-parallel-rpc-port", str(port_range(1)),
    )  # fmt: skip
    by_rank = {ranks(url)[0]["rank"]: url for url in marked.urls(2)}
    front_end = requests.get(f"{by_rank[1]}/status", timeout=END_TIMEOUT_S).json()["front_ends"][0]
    endpoint = psutil.Process(front_end["pid"]).parent()
    assert endpoint is not None
    assert "gateway.launch" in endpoint.cmdline()
    endpoint.kill()
    marked.until_log_has("the endpoint of rank 1 is gone: process")
    assert complete(by_rank[0]).status_code == 200
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 1, "somebody should look at what happened"
    poll_until(lambda: not marked.processes(), "no process is left")


def test_an_endpoint_that_is_killed_comes_back_on_its_port_with_its_supervisor(
    marked: MarkedRun, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    first = port_range(3)
    serve = marked.start(
        *simulated, "-dp", "2", "--data-parallel-multi-port-external-lb", "--port", str(first),
        "--data-parallel-rpc-port", str(first + 2),
    )  # fmt: skip
    urls = marked.urls(2)
    by_rank = {ranks(url)[0]["rank"]: url for url in urls}
    front_end = requests.get(f"{by_rank[1]}/status", timeout=END_TIMEOUT_S).json()["front_ends"][0]
    endpoint = psutil.Process(front_end["pid"]).parent()
    assert endpoint is not None
    endpoint.kill()
    marked.until_log_has("the endpoint of rank 1 starts again")
    assert complete(by_rank[0]).status_code == 200

    def is_back() -> bool:
        try:
            return complete(by_rank[1]).status_code == 200
        except requests.ConnectionError:
            return False

    poll_until(is_back, "the endpoint answers on its port again")
    serve.terminate()
    assert serve.wait(END_TIMEOUT_S) == 0
    assert marked.leftovers() == []


def test_the_service_manager_is_told_once_all_is_ready(
    marked: MarkedRun, simulated: list[str], port_range: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(END_TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        serve = marked.start(
            *simulated, "-dp", "2", "--data-parallel-multi-port-external-lb", "--port", "0",
            "--data-parallel-rpc-port", str(port_range(1)),
        )  # fmt: skip
        assert manager.recv(100) == b"READY=1"
        assert len(marked.urls(2)) == 2
        serve.terminate()
        assert serve.wait(END_TIMEOUT_S) == 0


def test_kill_9_of_the_supervisor_leaves_no_process(
    marked: MarkedRun, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    serve = marked.start(
        *simulated, "-dp", "2", "--data-parallel-multi-port-external-lb", "--port", "0",
        "--data-parallel-rpc-port", str(port_range(1)),
    )  # fmt: skip
    marked.urls(2)
    serve.kill()
    serve.wait(END_TIMEOUT_S)
    poll_until(lambda: not marked.processes(), "no process is left")

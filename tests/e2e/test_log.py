"""The log of a whole server: a line for each thing that happens, as text or as JSON, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import requests

from tests.e2e.conftest import ROOT

Serve = Callable[..., Any]
Poll = Callable[..., Any]


def lines_of(server: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.stderr]


def test_every_line_of_a_json_log_is_an_object_and_says_who_wrote_it(serve: Serve, simulated: list[str], poll: Poll) -> None:
    server = serve(*simulated, "-dp", "2", "--log-format", "json", "--enable-log-requests")
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 3}
    headers = {"X-Request-Id": "mine"}
    assert requests.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    refused = requests.post(f"{server.url}/v1/completions", json=body | {"max_tokens": -1}, headers=headers, timeout=60)
    assert refused.status_code == 400
    os.kill(server.rank(1)["pid"], signal.SIGKILL)
    poll(lambda: server.rank(1)["epoch"] == 2 and server.rank(1)["state"] == "ready", "rank 1 is back", 60)
    assert server.stop() == 0

    lines = lines_of(server)
    assert all(set(line) >= {"time", "level", "logger", "message"} for line in lines)
    of_request = [line for line in lines if str(line.get("request_id", "")).startswith("mine")]
    assert [line["process"] for line in of_request] == ["front end 0"] * len(of_request)
    assert any("ended by length" in line["message"] and line["rank"] in (0, 1) for line in of_request)
    assert any("failed: 400" in line["message"] for line in of_request)
    launchers = [line["message"] for line in lines if "process" not in line]
    node = os.uname().nodename
    for text in (
        "starting ranks 0 to 1",
        f"rank 1 (epoch 1) on {node}, pid ",
        f"rank 1 (epoch 1) is ready on {node}, cpu",
        "rank 1 (epoch 1) died, its next life begins in",
        f"rank 1 (epoch 2) is ready on {node}, cpu",
        "front end 0 serves as DPLBAsyncMPClient",
        "stopped",
    ):
        assert sum(message.startswith(text) for message in launchers) == 1, text


def test_the_cause_of_a_failed_start_is_an_object_too(serve: Serve, simulated: list[str]) -> None:
    with pytest.raises(AssertionError, match="ended before it was ready") as caught:
        serve(*simulated, "fault=raise_at_step=0", "--log-format", "json")
    last = str(caught.value).strip().splitlines()[-1]
    assert "simulated fault at step 0" in json.loads(last)["message"]


def test_no_key_is_in_the_log_in_status_or_in_ps(serve: Serve, simulated: list[str]) -> None:
    key, wrong = "key-of-this-server", "key-that-was-guessed"
    server = serve(*simulated, "-dp", "2", "--log-level", "debug", "--enable-log-requests", env={"GATEWAY_API_KEY": key})
    for given, status in ((key, 200), (wrong, 401)):
        body = {"model": "tiny", "prompt": "one two", "max_tokens": 3}
        headers = {"Authorization": f"Bearer {given}"}
        answer = requests.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == status
        assert requests.get(f"{server.url}/status", headers=headers, timeout=60).status_code in (200, 401)
    shown = requests.get(f"{server.url}/status", headers={"Authorization": f"Bearer {key}"}, timeout=60).text
    shown += "".join(" ".join(process.cmdline()) for process in server.descendants() if process.is_running())
    assert "cores.engine_core_proc" in shown
    assert '"ranks"' in shown
    assert server.stop() == 0
    log = "".join(server.stderr)
    assert "failed: 401" in log or "ended by length" in log
    for secret in (key, wrong):
        assert secret not in shown + log


def test_a_log_that_nobody_reads_stops_neither_the_launcher_nor_a_front_end(simulated: list[str], poll: Poll) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    flags = ("-dp", "2", "--port", "0", "--log-level", "debug", "--enable-log-requests")
    command = [sys.executable, "-m", "gateway", "serve", *simulated, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("gateway ready: ").split()[0]
        prompt = "word " * 8000
        for _ in range(20):  # a prompt is 40 kB of log, and its ids as much: ten times what all pipes hold
            answer = requests.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60)
            assert answer.status_code == 200, answer.text

        def rank_1() -> dict[str, Any]:
            rows: list[dict[str, Any]] = requests.get(f"{url}/status", timeout=60).json()["ranks"]
            return rows[1]

        os.kill(rank_1()["pid"], signal.SIGKILL)
        poll(
            lambda: (rank_1()["epoch"], rank_1()["state"]) == (2, "ready"),
            "the launcher has seen it and begun its next life",
            60,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()

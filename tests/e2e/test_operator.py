"""Drain, rolling restart and scaling of a group that serves: no request fails, and every answer is what it would have been."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

Serve = Callable[..., Any]
NUM_CLIENTS = 6
ORDER_TIMEOUT_S = 120


class Load:
    """Clients that stream answers one after the other. Equal prompts must have equal answers, whoever serves them."""

    def __init__(self, url: str) -> None:
        self.num_answers = 0
        self.problems: list[str] = []
        self._url = url
        self._answers: dict[str, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with aiohttp.ClientSession() as session:
            clients = [asyncio.create_task(self._client(session, i, stop)) for i in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                stop.set()
                await asyncio.gather(*clients)

    async def _client(self, session: aiohttp.ClientSession, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            prompt = f"prompt {number % 4}"
            body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 60 + number % 4, "stream": True}
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                text = (await response.read()).decode()
            answer = "".join(line.partition('"text":"')[2].partition('"')[0] for line in text.splitlines())
            if response.status != 200 or not text.endswith("data: [DONE]\n\n"):
                self.problems.append(f"{response.status} {text[-300:]}")
            elif self._answers.setdefault(prompt, answer) != answer:
                self.problems.append(f"{prompt}: {answer!r} and not {self._answers[prompt]!r}")
            self.num_answers += 1


async def operate(url: str, *words: str) -> tuple[int, str]:
    """`gateway ranks`, as an operator types it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "ranks", *words, "--url", url, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), ORDER_TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_rolling_restart_and_scaling_under_load_lose_no_request(serve: Serve, simulated: list[str]) -> None:
    server = serve(*simulated[:-1], "step_ms=10", "-dp", "2", "--api-server-count", "2")
    load = Load(server.url)
    async with load.running():
        restarted = "rank 0: ready, epoch 2\nrank 1: ready, epoch 2\n"
        assert await operate(server.url, "restart", "all", "--drain-timeout", "0.1") == (0, restarted)
        assert await operate(server.url, "scale", "4") == (0, "Scaled to 4 data parallel engines\n")
        assert (await operate(server.url, "drain", "0"))[0] == 0
        assert await operate(server.url, "scale", "1", "--drain-timeout", "0.1") == (0, "Scaled to 1 data parallel engine\n")
    assert load.problems == []
    assert load.num_answers > NUM_CLIENTS
    ranks = server.status()["ranks"]
    assert [(row["rank"], row["state"], row["deaths"]) for row in ranks] == [(1, "ready", 0)]
    status, output = await operate(server.url, "restart", "0")
    assert status == 1
    assert "rank 0 does not exist; the ranks are 1" in output


async def test_the_only_rank_is_restarted_and_requests_wait_for_it(serve: Serve, simulated: list[str]) -> None:
    server = serve(*simulated[:-1], "step_ms=10", "--engine-restarts", "0")
    load = Load(server.url)
    async with load.running():
        assert await operate(server.url, "restart", "0", "--drain-timeout", "0") == (0, "rank 0: ready, epoch 2\n")
    assert load.problems == []
    status, output = await operate(server.url, "scale", "2")
    assert status == 1
    assert "the number of ranks can only change where --data-parallel-size is 2 or more" in output

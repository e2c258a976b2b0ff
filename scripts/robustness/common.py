"""What the robustness scripts share: a server with simulated ranks, one stream read as it comes, percentiles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from cores.testing import make_tiny_model_dir
from scripts.benchmarks import servers
from scripts.benchmarks.load import percentile

MODEL = "model"
REQUEST_TIMEOUT_S = 300.0


@contextlib.contextmanager
def simulated_server(num_ranks: int, costs: list[str], *flags: str) -> Iterator[servers.Server]:
    """`costs` are words of the simulated engine's cost model."""
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_tiny_model_dir(Path(directory) / "tiny", max_model_len=8192))
        words = ["--engine", "simulated", "-dp", str(num_ranks), "--simulated", *costs]
        with servers.gateway("gateway", model, *words, *flags) as server:
            yield server


def url_of(server: servers.Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextlib.asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as session:
        yield session


async def status_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/status") as response:
        status: dict[str, Any] = await response.json()
        return status


@dataclass(slots=True)
class Answer:
    """One stream. Times are of the monotonic clock, one for each piece of text."""

    status: int = 0
    rank: int | None = None  # where it began
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_moves: int = 0
    retry_after_s: int | None = None
    error: str | None = None  # why it did not come whole

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def end_s(self) -> float:
        return self.times_s[-1]


async def stream(session: aiohttp.ClientSession, url: str, num_prompt_words: int, max_tokens: int, seed: int) -> Answer:
    """A prompt of its own, so that none is cached."""
    answer = Answer(sent_s=time.monotonic())
    body = {
        "model": MODEL, "prompt": f"{seed} " + "word " * num_prompt_words, "max_tokens": max_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = (await response.text())[:200]
                answer.retry_after_s = int(response.headers["Retry-After"]) if "Retry-After" in response.headers else None
                return answer
            answer.rank = int(response.headers["X-Gateway-Rank"])
            await _read(response, answer)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and answer.num_tokens != max_tokens:
        answer.error = f"{answer.num_tokens} tokens and not {max_tokens}"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if line.startswith(b'data: {"error"'):
            answer.error = line.decode()[:200]
        elif b'"usage":{' in line:
            usage = json.loads(line[6:])["usage"]
            answer.num_prompt_tokens, answer.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.num_moves = usage.get("num_moves", 0)
        elif line.startswith(b"data: {"):
            answer.times_s.append(time.monotonic())


def summary_ms(values_s: list[float]) -> str:
    if not values_s:
        return "none"
    p50, p99 = (1000 * percentile(values_s, share) for share in (0.5, 0.99))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, longest {1000 * max(values_s):.0f} ms"


def rss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


async def every(interval_s: float, until_s: float) -> AsyncIterator[int]:
    """0, 1, 2 … at their times, those that are late at once: what comes does not wait for what is slow."""
    start_s, number = time.monotonic(), 0
    while (due_s := start_s + number * interval_s) < until_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        yield number
        number += 1

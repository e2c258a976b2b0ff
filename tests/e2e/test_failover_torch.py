"""Two of three torch ranks are killed, one after the other, under streams of every kind: each goes on as if nothing was."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cores.runner.testing import make_tiny_llama
from tests.e2e.conftest import Server

NUM_OF_EACH = 64  # greedy, and seeded
MAX_TOKENS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
DEADLINE_S = 240.0


def bodies() -> list[dict[str, Any]]:
    greedy = [{"prompt": f"greedy {i}", "temperature": 0} for i in range(NUM_OF_EACH)]
    seeded = [{"prompt": f"seeded {i}", "temperature": 1.0, "seed": i, "top_p": 0.95} for i in range(NUM_OF_EACH)]
    several = [{"prompt": f"several {i}", "temperature": 1.0, "seed": i, "n": 3, "logprobs": 2} for i in range(6)]
    penalised = [{"prompt": f"again {i}", "temperature": 0.7, "seed": i, "frequency_penalty": 0.5} for i in range(6)]
    free = [{"max_tokens": MAX_TOKENS, "ignore_eos": True, **body} for body in (*greedy, *seeded, *several, *penalised)]
    schema = [
        {"prompt": f"json {i}", "temperature": 1.0, "seed": i, "max_tokens": 200, "structured_outputs": {"json": SCHEMA}}
        for i in range(8)
    ]
    return [{"model": "tiny", "stream": True, **body} for body in (*free, *schema)]


def ballast(rank: int) -> dict[str, Any]:
    """Runs longer than the test: when its rank is killed, the rank has work, however late this process comes to kill it."""
    body = {"prompt": f"ballast {rank}", "temperature": 0, "max_tokens": 12_000, "ignore_eos": True}
    return {"model": "tiny", "stream": True, **body}


class Stream:
    """One answer, as it comes."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.tokens: dict[int, list[str]] = {}
        self.logprobs: list[float] = []
        self.has_begun = asyncio.Event()

    async def read(self, session: aiohttp.ClientSession, url: str, rank: int | None = None) -> None:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        async with session.post(f"{url}/v1/completions", json=self.body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    event = json.loads(data)
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self._take(choice)
            assert data == ""
            assert response.content.at_eof()

    def _take(self, choice: dict[str, Any]) -> None:
        self.has_begun.set()
        index = choice["index"]
        self.texts[index] = self.texts.get(index, "") + choice["text"]
        if choice["finish_reason"]:
            assert index not in self.reasons
            self.reasons[index] = choice["finish_reason"]
        if choice.get("logprobs"):
            self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            self.logprobs += choice["logprobs"]["token_logprobs"] if index == 0 else []


def has_died(server: Server, rank: int) -> bool:
    return bool(server.rank(rank)["state"] == "dead")


async def test_every_stream_ends_as_in_an_undisturbed_run_when_two_of_three_ranks_are_killed(
    serve: Callable[..., Server], poll: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny", max_model_len=16_000)
    server = serve(
        str(model), "--device", "cpu", "--dtype", "float32", "-dp", "3", "--num-kv-blocks", "1024", "--engine-restarts", "0",
    )  # fmt: skip
    pids = [server.rank(rank)["pid"] for rank in range(3)]
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        runs = []
        for is_disturbed in (False, True):
            streams = [Stream(body) for body in bodies()]
            reading = [asyncio.create_task(stream.read(session, server.url)) for stream in streams]
            if is_disturbed:
                heavy = [asyncio.create_task(Stream(ballast(rank)).read(session, server.url, rank)) for rank in (0, 1)]
                for rank in (0, 1):
                    begun = [asyncio.create_task(stream.has_begun.wait()) for stream in streams[:NUM_OF_EACH]]
                    await asyncio.wait_for(asyncio.gather(*begun), DEADLINE_S)
                    os.kill(pids[rank], signal.SIGKILL)
                    is_dead = functools.partial(has_died, server, rank)
                    await asyncio.to_thread(poll, is_dead, f"the death of rank {rank}")
            await asyncio.gather(*reading)
            runs.append(streams)
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)
    for before, after in zip(*runs, strict=True):
        assert (after.texts, after.reasons, after.tokens) == (before.texts, before.reasons, before.tokens), after.body["prompt"]
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3)
    for stream in runs[1][-8:]:
        if stream.reasons[0] == "stop":
            json.loads(stream.texts[0])
    status = server.status()
    assert status["totals"]["failed"] == 0
    assert [rank["requests_moved_away"] > 0 for rank in status["ranks"]] == [True, True, False]
    assert [rank["state"] for rank in status["ranks"][:2]] == ["dead", "dead"]

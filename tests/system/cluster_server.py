"""`gateway serve` on the head of a Ray cluster made of network namespaces, spoken to over a Unix socket, which no network shuts
out; and streams that are compared with undisturbed ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from scripts.netns_cluster import HEAD, NetnsCluster

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 400.0  # ten times what the slowest of these takes


class ClusterServer:
    def __init__(self, cluster: NetnsCluster, directory: Path, model: str, *words: str) -> None:
        self.socket = directory / "gateway.sock"
        self._log = directory / "serve.log"
        command = [
            sys.executable, "-m", "gateway", "serve", model, "--ray-address", cluster.ray_address, "--uds", str(self.socket),
            *words,
        ]  # fmt: skip
        environment = cluster.environment | {"PYTHONPATH": str(ROOT)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(cluster.inside(HEAD, command), stdout=log, stderr=log, env=environment, cwd=ROOT)

    def log(self) -> str:
        return self._log.read_text()

    def session(self) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(str(self.socket), limit=0)
        return aiohttp.ClientSession("http://gateway", connector=connector, timeout=aiohttp.ClientTimeout(total=DEADLINE_S))

    async def until_ready(self) -> None:
        await self.until(lambda: "gateway ready: " in self.log() or self.process.poll() is not None, "its start")
        assert self.process.poll() is None, self.log()

    @staticmethod
    async def until(condition: Any, what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:g} s: {what}"
            await asyncio.sleep(0.05)

    async def until_rank(self, session: aiohttp.ClientSession, rank: int, **wanted: Any) -> dict[str, Any]:
        """Its row, once all of that holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            row: dict[str, Any] = (await status(session))["ranks"][rank]
            if all(row[name] == value for name, value in wanted.items()):
                return row
            assert time.monotonic() < deadline_s, f"rank {rank} is not {wanted} within {DEADLINE_S:g} s: {row}"
            await asyncio.sleep(0.05)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            print(self.log()[-10_000:])  # pytest shows it when the test has failed


async def status(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/status") as response:
        document: dict[str, Any] = await response.json()
        return document


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded ones in turn."""
    return [
        {
            "model": "tiny", "prompt": f"stream {i}", "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
            "temperature": i % 2, "seed": i,
        }
        for i in range(count)
    ]  # fmt: skip


class Stream:
    """One answer, as it comes. Pinned to a rank or not."""

    def __init__(self, session: aiohttp.ClientSession, body: dict[str, Any], rank: int | None = None) -> None:
        self.has_begun = asyncio.Event()
        self.text = ""
        self.longest_pause_s = 0.0
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        self.reading = asyncio.create_task(self._read(session, body, headers))

    async def _read(self, session: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str]) -> str:
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            last_s = time.monotonic()
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    event = json.loads(data)
                    assert "error" not in event, event
                    self.text += event["choices"][0]["text"]
                    self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - last_s)
                    last_s = time.monotonic()
                    self.has_begun.set()
        return self.text


async def texts(session: aiohttp.ClientSession, wanted: Sequence[dict[str, Any]]) -> list[str]:
    return list(await asyncio.gather(*(Stream(session, body).reading for body in wanted)))


async def begun(streams: Sequence[Stream]) -> None:
    """When every one has its first token."""
    async with asyncio.timeout(DEADLINE_S):
        for stream in streams:
            waits = {asyncio.create_task(stream.has_begun.wait()), stream.reading}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert stream.has_begun.is_set(), stream.reading.exception()

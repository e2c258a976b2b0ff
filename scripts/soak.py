"""Thousands of requests with random cancels, disconnects, n > 1, stop strings and slow readers; every answer is checked.

Against a real server: two front ends, two ranks, the simulated engine, whose tokens depend on the prompt and the seed alone. So
what a request must answer is known from an undisturbed run at the start. In the end nothing may be left in flight anywhere, and
memory must not have grown. Exit code 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil

from cores.testing import make_tiny_model_dir

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPTS = 48
MAX_TOKENS = 200
NUM_WORKERS = 48
# Full within the first third of a minute: an index of cached blocks that still grows would look like a leak.
NUM_KV_BLOCKS = 4096
IDLE_DEADLINE_S = 20.0
MAX_GROWTH_MIB_PER_1000 = 1.0  # requests, of any process, after the warm-up
EXPECTED_LOG_WORDS = (" INFO ",)


@dataclass(frozen=True)
class Expected:
    """One prompt, and its undisturbed answer."""

    prompt: str
    sampling: dict[str, Any]
    pieces: list[str]  # the text of each token

    def text(self, num_tokens: int) -> str:
        return "".join(self.pieces[:num_tokens])


@dataclass
class Tally:
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def check(self, kind: str, what: str, got: object, want: object) -> None:
        if got != want:
            self.faults.append(f"{kind}: {what}: got {got!r}, expected {want!r}")


class Client:
    def __init__(self, url: str, rng: random.Random, pool: list[Expected], tally: Tally) -> None:
        self._url = url
        self._rng = rng
        self._pool = pool
        self._tally = tally

    async def run(self, until_s: float) -> None:
        """Requests of random kinds, one after the other."""
        kinds: list[Callable[[Expected, int], Any]] = [
            self.whole, self.stream, self.cancelled, self.gone_at_once, self.several, self.stopped, self.slow,
        ]  # fmt: skip
        while time.monotonic() < until_s:
            kind = self._rng.choices(kinds, weights=[4, 6, 4, 2, 2, 3, 1])[0]
            await kind(self._rng.choice(self._pool), self._rng.randint(1, MAX_TOKENS))
            self._tally.done[kind.__name__] += 1

    async def whole(self, expected: Expected, num_tokens: int) -> None:
        answer = await self._post(expected, max_tokens=num_tokens)
        self._check_choice("whole", answer["choices"][0], expected.text(num_tokens), "length")
        self._tally.check("whole", "completion_tokens", answer["usage"]["completion_tokens"], num_tokens)

    async def several(self, expected: Expected, num_tokens: int) -> None:
        answer = await self._post(expected, max_tokens=num_tokens, n=3)
        self._tally.check("several", "indexes", [c["index"] for c in answer["choices"]], [0, 1, 2])
        self._check_choice("several", answer["choices"][0], expected.text(num_tokens), "length")
        self._tally.check("several", "completion_tokens", answer["usage"]["completion_tokens"], 3 * num_tokens)

    async def stopped(self, expected: Expected, num_tokens: int) -> None:
        stop = "".join(expected.pieces[num_tokens : num_tokens + 2]) or "\0"
        before, found, _ = expected.text(MAX_TOKENS).partition(stop)
        answer = await self._post(expected, max_tokens=MAX_TOKENS, stop=stop)
        self._check_choice("stopped", answer["choices"][0], before, "stop" if found else "length")

    async def stream(self, expected: Expected, num_tokens: int) -> None:
        await self._read_stream("stream", expected, num_tokens, pause_s=0.0)

    async def slow(self, expected: Expected, num_tokens: int) -> None:
        await self._read_stream("slow", expected, num_tokens, pause_s=0.02)

    async def _read_stream(self, kind: str, expected: Expected, num_tokens: int, pause_s: float) -> None:
        text, reasons = "", []
        async with aclosing(self._events(expected, max_tokens=num_tokens)) as events:
            async for choice in events:
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                await asyncio.sleep(pause_s)
        self._tally.check(kind, "text", text, expected.text(num_tokens))
        self._tally.check(kind, "finish reasons", reasons, ["length"])

    async def cancelled(self, expected: Expected, num_tokens: int) -> None:
        text, events_left = "", self._rng.randint(1, num_tokens)
        async with aclosing(self._events(expected, max_tokens=MAX_TOKENS)) as events:
            async for choice in events:
                text += choice["text"]
                events_left -= 1
                if events_left == 0:
                    break
        if not expected.text(MAX_TOKENS).startswith(text):
            self._tally.faults.append(f"cancelled: {text!r} is not how {expected.prompt!r} goes on")

    async def gone_at_once(self, expected: Expected, num_tokens: int) -> None:
        request = asyncio.create_task(self._post(expected, max_tokens=MAX_TOKENS))
        await asyncio.sleep(self._rng.random() * 0.02)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    def _check_choice(self, kind: str, choice: dict[str, Any], text: str, reason: str) -> None:
        self._tally.check(kind, "text", choice["text"], text)
        self._tally.check(kind, "finish reason", choice["finish_reason"], reason)

    async def _post(self, expected: Expected, **fields: Any) -> dict[str, Any]:
        body = {"prompt": expected.prompt, "ignore_eos": True, **expected.sampling, **fields}
        # A connection of its own, so that every front end gets some.
        async with aiohttp.ClientSession() as session, session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise AssertionError(f"HTTP {response.status}: {await response.text()}")
            answer: dict[str, Any] = await response.json()
            return answer

    async def _events(self, expected: Expected, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        body = {"prompt": expected.prompt, "ignore_eos": True, "stream": True, **expected.sampling, **fields}
        async with aiohttp.ClientSession() as session, session.post(f"{self._url}/v1/completions", json=body) as response:
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)["choices"][0]


async def undisturbed(url: str, prompt: str, sampling: dict[str, Any]) -> Expected:
    """The answer of a quiet server, token by token."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS + 2, "ignore_eos": True, "logprobs": 0, **sampling}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    return Expected(prompt, sampling, answer["choices"][0]["logprobs"]["tokens"])


@dataclass
class Memory:
    """Resident MiB of each process, over the number of requests done."""

    pids: dict[str, int]
    points: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def read(self, num_requests: int) -> None:
        mib = {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in self.pids.items()}
        self.points.append((num_requests, mib))

    def growth(self) -> dict[str, float]:
        """MiB per 1,000 requests: the slope of a straight line through all points from the first third on, as before it caches
        fill."""
        points = self.points[len(self.points) // 3 :]
        return {name: 1000 * slope([(n, mib[name]) for n, mib in points]) for name in self.pids}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """By least squares."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def is_idle(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        status = await response.json()
    ranks = all(r["waiting"] == r["running"] == r["ledger_tokens"] == r["kv_cache_usage"] == 0 for r in status["ranks"])
    return ranks and all(front_end["in_flight"] == 0 for front_end in status["front_ends"])


async def soak(url: str, seconds: float, seed: int, tally: Tally) -> Memory:
    rng = random.Random(seed)
    plans = [
        (f"prompt {i} " + "word " * rng.randint(0, 60), {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i})
        for i in range(NUM_PROMPTS)
    ]
    pool = list(await asyncio.gather(*(undisturbed(url, *plan) for plan in plans)))
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        status = await response.json()
    pids = {f"front end {f['index']}": f["pid"] for f in status["front_ends"]}
    memory = Memory(pids | {f"rank {r['rank']}": r["pid"] for r in status["ranks"]})
    until_s = time.monotonic() + seconds
    clients = [Client(url, random.Random(rng.random()), pool, tally) for _ in range(NUM_WORKERS)]
    workers = [asyncio.create_task(client.run(until_s)) for client in clients]
    while time.monotonic() < until_s:
        await asyncio.sleep(min(2.0, seconds / 10))
        memory.read(sum(tally.done.values()))
    for end in await asyncio.gather(*workers, return_exceptions=True):
        if isinstance(end, BaseException):
            tally.faults.append(f"a client failed: {end!r}")
    deadline_s = time.monotonic() + IDLE_DEADLINE_S
    while not await is_idle(url):
        if time.monotonic() > deadline_s:
            tally.faults.append("something is still in flight")
            break
        await asyncio.sleep(0.1)
    return memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tally = Tally()
    with TemporaryDirectory() as directory, open(Path(directory) / "log", "w+") as log:
        model = make_tiny_model_dir(Path(directory) / "tiny", max_model_len=4096)
        command = [
            sys.executable, "-m", "gateway", "serve", str(model), "--engine", "simulated", "--simulated", "step_ms=2",
            "--data-parallel-backend", "mp", "-dp", "2", "--api-server-count", "2", "--port", "0",
            "--num-kv-blocks", str(NUM_KV_BLOCKS),
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("gateway ready: ").split()[0]
        memory = asyncio.run(soak(url, args.seconds, args.seed, tally))
        server.terminate()
        tally.check("server", "exit code", server.wait(60), 0)
        log.seek(0)
        tally.faults += [f"log: {line.strip()}" for line in log if not any(word in line for word in EXPECTED_LOG_WORDS)]
    growth = memory.growth()
    for name, mib in growth.items():
        if mib > MAX_GROWTH_MIB_PER_1000:
            tally.faults.append(f"{name} grew by {mib:.2f} MiB per 1,000 requests")
    print(f"{sum(tally.done.values())} requests in {args.seconds:g} s: {dict(sorted(tally.done.items()))}")
    print("MiB per 1,000 requests:", {name: round(g, 3) for name, g in growth.items()})
    print(f"{len(tally.faults)} faults")
    print(*tally.faults[:20], sep="\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())

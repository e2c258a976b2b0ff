"""Requests of many kinds whose answers are known beforehand, from clients that check them.

The simulated engine's tokens depend on the prompt and the seed alone: an undisturbed server says what any other must answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MAX_TOKENS = 200
IDLE_DEADLINE_S = 60.0


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
    blamed: int = 0  # requests that were there at too many deaths, and may have been their cause

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
            try:
                await kind(self._rng.choice(self._pool), self._rng.randint(1, MAX_TOKENS))
            except BlamedError:
                self._tally.blamed += 1
            else:
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
                raise _error(f"HTTP {response.status}: {await response.text()}")
            answer: dict[str, Any] = await response.json()
            return answer

    async def _events(self, expected: Expected, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        body = {"prompt": expected.prompt, "ignore_eos": True, "stream": True, **expected.sampling, **fields}
        async with aiohttp.ClientSession() as session, session.post(f"{self._url}/v1/completions", json=body) as response:
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data.startswith('{"error"'):
                    raise _error(data)
                if data and data != "[DONE]":
                    yield json.loads(data)["choices"][0]


class BlamedError(Exception):
    """The server says that the request may be what ranks died of."""


def _error(text: str) -> Exception:
    return BlamedError(text) if "may be their cause" in text else AssertionError(text)


async def undisturbed(url: str, prompt: str, sampling: dict[str, Any]) -> Expected:
    """The answer of a quiet server, token by token."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS + 2, "ignore_eos": True, "logprobs": 0, **sampling}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    return Expected(prompt, sampling, answer["choices"][0]["logprobs"]["tokens"])


async def make_pool(url: str, size: int, rng: random.Random) -> list[Expected]:
    """Prompts of random lengths, every other one sampled."""
    plans = [
        (f"prompt {i} " + "word " * rng.randint(0, 60), {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i})
        for i in range(size)
    ]
    return list(await asyncio.gather(*(undisturbed(url, *plan) for plan in plans)))


async def is_idle(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        status = await response.json()
    ranks = all(r["waiting"] == r["running"] == r["ledger_tokens"] == r["kv_cache_usage"] == 0 for r in status["ranks"])
    return ranks and all(front_end["in_flight"] == 0 for front_end in status["front_ends"])


async def wait_until_idle(url: str, tally: Tally) -> None:
    deadline_s = time.monotonic() + IDLE_DEADLINE_S
    while not await is_idle(url):
        if time.monotonic() > deadline_s:
            tally.faults.append("something is still in flight")
            return
        await asyncio.sleep(0.1)

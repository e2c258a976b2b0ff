"""A closed loop of streaming requests, from a process of its own: every connection sends its next request when one has ended.

`closed_loop` starts that process and returns what it measured. It parses no JSON and uses no HTTP library, so that it takes
little of the machine that it shares with the server: 4 to 6 µs a chunk. What it took is in the result.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import uvloop

SILENCE_TIMEOUT_S = 120.0
_FIRST_TOKEN = re.compile(rb'"(?:content|text)":"[^"]')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d+)')
_CONTENT_LENGTH = re.compile(rb"(?i)\r\ncontent-length: ?(\d+)")
_END_OF_CHUNKS = b"0\r\n\r\n"


class LoadError(Exception):
    """The server did not answer as it should: nothing was measured."""


@dataclass(slots=True)
class LoadResult:
    """Of one closed loop. `tokens` and `prompt_tokens` are what the server says in its usage."""

    num_requests: int
    duration_s: float
    tokens: int
    prompt_tokens: int
    chunks: int  # events with a piece of an answer, roles and usage included
    client_cpu_s: float
    ttft_s: list[float] = field(default_factory=list)  # to the first text, one per request
    itl_s: list[float] = field(default_factory=list)  # between chunks; 0 for those that came together

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else float("nan")


def closed_loop(port: int, path: str, bodies: list[dict[str, Any]], concurrency: int, headers: str = "") -> LoadResult:
    """Sends all bodies, with these further headers. Raises `LoadError` if any request fails."""
    orders = {
        "port": port, "path": path, "bodies": [json.dumps(body) for body in bodies], "concurrency": concurrency,
        "headers": headers,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(orders), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LoadError(done.stderr.strip().rpartition("\n")[2] or f"the load client ended with {done.returncode}")
    return LoadResult(**json.loads(done.stdout))


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._sent_s = self._last_s = time.monotonic()
        self._head = b""  # until it is complete
        self._body_length: int | None = None  # None: chunked
        self._num_received = 0
        self._tail = b""
        self._has_head = self._has_text = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour only
        self._send_next()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.fail(f"the server closed a connection: {error}")

    def _send_next(self) -> None:
        assert self._transport is not None
        request = next(self._load.requests, None)
        self._reset()
        if request is not None:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._has_head:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            self._has_head = True
            if not head.startswith(b"HTTP/1.1 200"):
                self._load.fail(f"{head[:60]!r} {data[:300]!r}")
            length = _CONTENT_LENGTH.search(head)
            self._body_length = int(length[1]) if length else None
        self._num_received += len(data)
        self._note_chunks(data, now)
        # An event may be cut by a read. What counts stands at the end, and is found with what came before it.
        self._tail = (self._tail + data)[-1024:]
        if self._num_received == self._body_length or (self._body_length is None and self._tail.endswith(_END_OF_CHUNKS)):
            self._end(now)

    def _note_chunks(self, data: bytes, now: float) -> None:
        result, count = self._load.result, data.count(b"data: {")
        if not count:
            return
        result.chunks += count
        if self._has_text:
            result.itl_s.append(now - self._last_s)
            result.itl_s += [0.0] * (count - 1)
        elif first := _FIRST_TOKEN.search(data):
            self._has_text = True
            result.ttft_s.append(now - self._sent_s)
            result.itl_s += [0.0] * data.count(b"data: {", first.end())
        self._last_s = now

    def _end(self, now: float) -> None:
        result = self._load.result
        tokens, prompt_tokens = _COMPLETION_TOKENS.search(self._tail), _PROMPT_TOKENS.search(self._tail)
        if tokens is None or prompt_tokens is None:
            self._load.fail(f"an answer without usage: {self._tail[-300:]!r}")
            return
        result.tokens += int(tokens[1])
        result.prompt_tokens += int(prompt_tokens[1])
        result.num_requests += 1
        if result.num_requests == self._load.num_planned:
            self._load.done.set_result(now)
        else:
            self._send_next()


class Load:
    """What all connections share. Made on a running loop."""

    def __init__(self, requests: list[bytes]) -> None:
        self.requests: Iterator[bytes] = iter(requests)
        self.num_planned = len(requests)
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.result = LoadResult(0, 0.0, 0, 0, 0, 0.0)

    def fail(self, cause: str) -> None:
        if not self.done.done():
            self.done.set_exception(LoadError(cause))


async def run(port: int, path: str, bodies: list[str], concurrency: int, headers: str = "") -> LoadResult:
    load = Load([http_request(port, path, body.encode(), headers) for body in bodies])
    cpu_s, start_s = time.process_time(), time.monotonic()
    loop = asyncio.get_running_loop()
    for _ in range(min(concurrency, len(bodies))):
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", port)
    while not load.done.done():
        num_chunks = load.result.chunks
        await asyncio.wait([load.done], timeout=SILENCE_TIMEOUT_S)
        if load.result.chunks == num_chunks:
            load.fail(f"nothing came for {SILENCE_TIMEOUT_S:.0f} s")
    load.result.duration_s = load.done.result() - start_s
    load.result.client_cpu_s = time.process_time() - cpu_s
    return load.result


def http_request(port: int, path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head += f"\r\n{headers}" if headers else ""
    return head.encode() + b"\r\n\r\n" + body


def main() -> None:
    try:
        result = uvloop.run(run(**json.load(sys.stdin)))
    except (LoadError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    # Not print: with PYTHONUNBUFFERED a pipe that takes only a part of a write loses the rest.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(json.dumps(asdict(result)).encode())


if __name__ == "__main__":
    main()

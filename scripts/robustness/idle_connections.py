"""Ten thousand connections that want nothing, some of which send their headers a byte at a time, and giant headers: what they
cost the requests beside them, and the server's memory.

Requests stream at a fixed rate, first alone, then beside the crowd: 70 % of it has sent nothing, 15 % has asked `/live` once
and keeps its connection, 15 % sends a header byte every second and never ends. Giant headers (1 MiB, and 10,000 lines) come all
the while, one after the other.

    python -m scripts.robustness.idle_connections

Exit code 0 only if the crowd was let in, every request beside it came whole, giants got a 4xx or were hung up on, a connection
costs at most 64 KiB, and the server has closed all of them by itself 75 s later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from gateway.server.app import KEEPALIVE_TIMEOUT_S
from scripts.benchmarks import servers
from scripts.robustness.common import (
    Answer,
    client_session,
    every,
    rss_mib,
    simulated_server,
    status_of,
    stream,
    summary_ms,
    url_of,
)

COSTS = ["step_ms=10", "prefill_us=20", "seq_us=20"]
RATE, MAX_TOKENS, PROMPT_WORDS = 20.0, 20, 50
OPENERS = 200  # connections that are opened at the same time
SHARE_ASKING, SHARE_DRIPPING = 0.15, 0.15
MAX_KIB_EACH = 64.0
CLOSING_MARGIN_S = 30.0
GIANTS = (
    b"GET /health HTTP/1.1\r\nHost: t\r\nX-Giant: " + b"a" * 2**20 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: t\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
    b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: t\r\n\r\n",
)
GIANT_ENDS = {"400", "414", "431", "hung up"}
HEAD = b"GET /live HTTP/1.1\r\nHost: t\r\n"


@dataclass
class Crowd:
    """Connections to one port, and what becomes of them."""

    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    dripping: list[asyncio.StreamWriter] = field(default_factory=list)
    num_refused: int = 0
    num_closed: int = 0  # by the server
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    async def gather(self, size: int) -> None:
        gate = asyncio.Semaphore(OPENERS)

        async def open_one(number: int) -> None:
            async with gate:
                await self._open(number / size)

        await asyncio.gather(*(open_one(number) for number in range(size)))

    async def _open(self, place: float) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            self.num_refused += 1
            return
        self.writers.append(writer)
        if place < SHARE_ASKING:
            writer.write(HEAD + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
        elif place < SHARE_ASKING + SHARE_DRIPPING:
            writer.write(HEAD + b"X-Slow: ")
            self.dripping.append(writer)
        self.readers.append(asyncio.create_task(self._until_closed(reader)))

    async def _until_closed(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        self.num_closed += 1

    async def drip(self) -> None:
        while True:
            for writer in self.dripping:
                if not writer.is_closing():
                    writer.write(b"a")
            await asyncio.sleep(1.0)

    def leave(self) -> None:
        for task in self.readers:
            task.cancel()
        for writer in self.writers:
            writer.close()


async def send_giants(port: int, ends: Counter[str]) -> None:
    for number in range(10**9):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(GIANTS[number % len(GIANTS)])
            line = await reader.readline()
            ends[line.split()[1].decode() if line else "hung up"] += 1
        except ConnectionError:
            ends["hung up"] += 1
        finally:
            writer.close()
        await asyncio.sleep(0.2)


async def live_requests(session: aiohttp.ClientSession, url: str, seconds: float, first: int) -> list[Answer]:
    requests = []
    async for number in every(1.0 / RATE, time.monotonic() + seconds):
        requests.append(asyncio.create_task(stream(session, url, PROMPT_WORDS, MAX_TOKENS, first + number)))
    return list(await asyncio.gather(*requests))


def gaps_s(answers: list[Answer]) -> list[float]:
    return [b - a for answer in answers for a, b in zip(answer.times_s, answer.times_s[1:], strict=False)]


@dataclass
class Result:
    size: int
    num_refused: int
    num_there: int  # when the requests beside them were over
    num_closed: int  # by the server, in the end
    opening_s: float
    closing_s: float
    rss_mib: tuple[float, float, float]  # before, with all of them, when all were closed
    giants: Counter[str]
    alone: list[Answer]
    beside: list[Answer]

    @property
    def kib_each(self) -> float:
        return 1024 * (self.rss_mib[1] - self.rss_mib[0]) / self.size

    @property
    def broken(self) -> list[str | None]:
        return [answer.error for answer in self.alone + self.beside if not answer.is_whole]

    def show(self) -> None:
        before, _, after = self.rss_mib
        refused = f"{self.num_refused} refused; {self.num_there} there after the load"
        print(f"{self.size} connections in {self.opening_s:.1f} s, {refused}")
        print(f"{self.kib_each:.1f} KiB each; front end {before:.0f} MiB before, {after:.0f} MiB when all were closed")
        for name, answers in (("alone", self.alone), ("beside them", self.beside)):
            first = summary_ms([answer.ttft_s for answer in answers if answer.is_whole])
            print(f"{len(answers)} requests {name}: first token {first}; between tokens {summary_ms(gaps_s(answers))}")
        print(f"{self.num_closed} closed by the server within {self.closing_s:.0f} s; giant headers: {dict(self.giants)}")
        print(f"{len(self.broken)} requests broken", *self.broken[:5], sep="\n")

    @property
    def is_good(self) -> bool:
        everybody_in = self.num_refused == 0 and self.num_closed == self.size
        return everybody_in and not self.broken and self.giants.keys() <= GIANT_ENDS and self.kib_each <= MAX_KIB_EACH


async def measure(port: int, url: str, size: int, seconds: float) -> Result:
    crowd, giants = Crowd(port), Counter[str]()
    async with client_session() as session:
        (front_end,) = (await status_of(session, url))["front_ends"]
        await live_requests(session, url, 2.0, 0)  # warms up
        alone = await live_requests(session, url, seconds, 10_000)
        rss, start_s = [rss_mib(front_end["pid"])], time.monotonic()
        await crowd.gather(size)
        opened_s = time.monotonic()
        rss.append(rss_mib(front_end["pid"]))
        dripping = asyncio.create_task(crowd.drip())
        sending = asyncio.create_task(send_giants(port, giants))
        beside = await live_requests(session, url, seconds, 20_000)
        num_there = len(crowd.writers) - crowd.num_closed
        sending.cancel()
        await asyncio.wait(crowd.readers, timeout=KEEPALIVE_TIMEOUT_S + CLOSING_MARGIN_S)
        closed_s = time.monotonic()
        dripping.cancel()
        rss.append(rss_mib(front_end["pid"]))
        crowd.leave()
    return Result(
        len(crowd.writers), crowd.num_refused, num_there, crowd.num_closed, opened_s - start_s, closed_s - opened_s,
        (rss[0], rss[1], rss[2]), giants, alone, beside,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests, alone and beside the crowd")
    args = parser.parse_args()
    servers.end_in_order_on_sigterm()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with simulated_server(2, COSTS) as server:
        result = asyncio.run(measure(server.port, url_of(server), args.connections, args.seconds))
    result.show()
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())

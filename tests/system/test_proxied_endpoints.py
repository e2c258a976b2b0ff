"""Whole endpoints behind real proxies: `gateway serve`, four times, restarted, killed and drained while clients stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from cores.testing import make_tiny_model_dir
from tests.e2e.conftest import Server
from tests.system.proxies import ACTIVE, DEADLINE_S, PROXIES, Proxy

pytestmark = pytest.mark.system

NUM_RANKS = 4
NUM_CLIENTS = 12
MAX_TOKENS = 20
ENDLESS = 900_000  # tokens; at 5 ms a step more than an hour


class Endpoints:
    """Four `gateway serve --data-parallel-external-lb`, each on a port of its own that it gets again."""

    def __init__(self, model: str) -> None:
        *self.ports, rpc_port = ports_for_restarts(NUM_RANKS + 1)
        self._arguments = [
            model, "--engine", "simulated", "--data-parallel-backend", "mp", "--simulated", "step_ms=5",
            "-dp", str(NUM_RANKS), "--data-parallel-external-lb", "--data-parallel-rpc-port", str(rpc_port),
        ]  # fmt: skip
        self.servers: dict[int, Server] = {}

    def start(self, rank: int) -> None:
        self.servers[rank] = Server(*self._arguments, "--data-parallel-rank", str(rank), "--port", str(self.ports[rank]))

    def stop(self, rank: int) -> int:
        return self.servers.pop(rank).stop()

    async def start_missing(self) -> None:
        """All of them at first; those that a failed test has left stopped."""
        missing = set(range(NUM_RANKS)) - self.servers.keys()
        await asyncio.gather(*(asyncio.to_thread(self.start, rank) for rank in missing))

    def totals(self, name: str) -> int:
        return sum(server.status()["totals"][name] for server in self.servers.values())

    def are_idle(self) -> bool:
        return all(server.is_idle() for server in self.servers.values())


def ports_for_restarts(number: int) -> list[int]:
    """Not among those that the kernel gives to outgoing connections: one could have it while its server is restarted."""
    first_ephemeral = 32768
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < number:
            port = random.SystemRandom().randrange(20_000, first_ephemeral)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
        return found


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    model = make_tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny", max_model_len=1_000_000)
    endpoints = Endpoints(str(model))
    try:
        yield endpoints
    finally:
        for rank in list(endpoints.servers):
            endpoints.stop(rank)


@pytest.fixture(params=sorted(PROXIES))
async def proxy(request: pytest.FixtureRequest, endpoints: Endpoints, start_proxy: Callable[..., Proxy]) -> Proxy:
    await endpoints.start_missing()
    proxy: Proxy = await asyncio.to_thread(start_proxy, request.param, endpoints.ports)
    await knows(proxy, set(range(NUM_RANKS)))
    return proxy


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


async def knows(proxy: Proxy, ranks: set[int]) -> None:
    """Until a proxy that probes takes exactly these for up."""
    if proxy.program in ACTIVE:
        async with asyncio.timeout(DEADLINE_S):
            while await asyncio.to_thread(proxy.endpoints_up) != ranks:
                await asyncio.sleep(0.05)


def body(max_tokens: int = MAX_TOKENS, *, stream: bool = False) -> dict[str, Any]:
    prompt = [random.randrange(3, 90) for _ in range(10)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


@dataclass
class Load:
    """Clients that ask again and again, streamed and not, until told to stop. Every answer must be whole."""

    http: aiohttp.ClientSession
    url: str
    answers: Counter[int] = field(default_factory=Counter)  # by rank
    killed: set[int] = field(default_factory=set)  # ranks whose answers break off, when they have begun
    failures: list[str] = field(default_factory=list)
    is_over: bool = False
    _answered: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def client(self, number: int) -> None:
        is_stream = number % 2 == 0
        while not self.is_over:
            try:
                self.answers[await self._ask(is_stream)] += 1
            except (aiohttp.ClientError, AssertionError, TimeoutError) as error:
                self.failures.append(repr(error))
            async with self._answered:
                self._answered.notify_all()

    async def _ask(self, is_stream: bool) -> int:
        async with self.http.post(f"{self.url}/v1/completions", json=body(stream=is_stream)) as response:
            assert response.status == 200, f"{response.status} {await response.text()}"
            rank = int(response.headers["X-Gateway-Rank"])
            try:
                answer = await response.read()
            except aiohttp.ClientPayloadError:
                assert rank in self.killed, f"an answer of rank {rank} broke off"
                return rank
        if is_stream:
            assert answer.endswith(b"data: [DONE]\n\n"), answer[-300:]
        else:
            assert json.loads(answer)["usage"]["completion_tokens"] == MAX_TOKENS
        return rank

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._answered:
            await self._answered.wait_for(lambda: condition() or bool(self.failures))
        assert self.failures == []

    async def more(self, number: int) -> None:
        wanted = self.answers.total() + number
        await self.until(lambda: self.answers.total() >= wanted)

    async def served_again_by(self, rank: int) -> None:
        before = self.answers[rank]
        await self.until(lambda: self.answers[rank] > before)


@contextlib.asynccontextmanager
async def load(http: aiohttp.ClientSession, proxy: Proxy) -> AsyncIterator[Load]:
    load = Load(http, proxy.url)
    async with asyncio.TaskGroup() as clients:
        for number in range(NUM_CLIENTS):
            clients.create_task(load.client(number))
        try:
            yield load
        finally:
            load.is_over = True
    assert load.failures == []


class Stream:
    """One endless answer that is read when the test says so."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.rank = int(response.headers["X-Gateway-Rank"])

    @classmethod
    async def open(cls, http: aiohttp.ClientSession, proxy: Proxy) -> Stream:
        """Returns with the first token."""
        response = await http.post(f"{proxy.url}/v1/completions", json=body(ENDLESS, stream=True))
        assert response.status == 200, await response.text()
        stream = cls(response)
        await stream.read_on(1)
        return stream

    async def read_on(self, events: int) -> None:
        """Raises `aiohttp.ClientPayloadError` when the connection breaks."""
        for _ in range(2 * events):  # each event has a line of data and an empty one
            assert await self._response.content.readline(), "the stream ended as if it were whole"

    async def is_broken(self) -> bool:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            await self.read_on(ENDLESS)
        return True

    def close(self) -> None:
        self._response.close()


async def test_all_endpoints_are_restarted_under_load_without_a_failed_request(
    endpoints: Endpoints, proxy: Proxy, http: aiohttp.ClientSession
) -> None:
    async with load(http, proxy) as clients:
        for rank in range(NUM_RANKS):
            await clients.more(2 * NUM_CLIENTS)
            assert await asyncio.to_thread(endpoints.stop, rank) == 0
            await clients.more(2 * NUM_CLIENTS)
            await asyncio.to_thread(endpoints.start, rank)
            await clients.served_again_by(rank)
            await knows(proxy, set(range(NUM_RANKS)))


async def test_an_endpoint_that_is_killed_costs_its_own_streams_alone(
    endpoints: Endpoints, proxy: Proxy, http: aiohttp.ClientSession
) -> None:
    streams = list(await asyncio.gather(*(Stream.open(http, proxy) for _ in range(4 * NUM_RANKS))))
    lost = streams[0].rank
    async with load(http, proxy) as clients:
        await clients.more(NUM_CLIENTS)
        clients.killed.add(lost)
        endpoints.servers[lost].process.kill()
        await asyncio.to_thread(endpoints.stop, lost)
        async with asyncio.timeout(DEADLINE_S):
            assert all(await asyncio.gather(*(stream.is_broken() for stream in streams if stream.rank == lost)))
        others = [stream for stream in streams if stream.rank != lost]
        assert {stream.rank for stream in others} == set(range(NUM_RANKS)) - {lost}
        await clients.more(2 * NUM_CLIENTS)
        await asyncio.gather(*(stream.read_on(20) for stream in others))
        await asyncio.to_thread(endpoints.start, lost)
        await clients.served_again_by(lost)
    for stream in streams:
        stream.close()


async def test_an_endpoint_that_an_operator_drains_gets_nothing_new_and_keeps_its_streams(
    endpoints: Endpoints, proxy: Proxy, http: aiohttp.ClientSession
) -> None:
    stream = await Stream.open(http, proxy)
    rank, server = stream.rank, endpoints.servers[stream.rank]
    async with http.post(f"{server.url}/admin/ranks/{rank}/drain") as response:
        assert response.status == 200, await response.text()
    assert (await asyncio.to_thread(server.get, "/ready")).status_code == 503
    async with load(http, proxy) as clients:
        await clients.more(4 * NUM_CLIENTS)
        assert clients.answers[rank] == 0
        await stream.read_on(20)
        async with http.post(f"{server.url}/admin/ranks/{rank}/undrain") as response:
            assert response.status == 200, await response.text()
        await clients.served_again_by(rank)
    stream.close()


async def test_clients_that_leave_free_the_engines(endpoints: Endpoints, proxy: Proxy, http: aiohttp.ClientSession) -> None:
    before = await asyncio.to_thread(endpoints.totals, "aborted")
    streams = await asyncio.gather(*(Stream.open(http, proxy) for _ in range(2 * NUM_RANKS)))
    assert {stream.rank for stream in streams} == set(range(NUM_RANKS))
    for stream in streams:
        stream.close()
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(endpoints.are_idle):
            await asyncio.sleep(0.05)
    assert await asyncio.to_thread(endpoints.totals, "aborted") - before == len(streams)

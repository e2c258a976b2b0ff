"""Whole endpoints behind real proxies: `gateway serve`, four times, restarted, killed and drained while clients stream.

The proxies stand side by side in front of the same endpoints, so that each fault is made once for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from cores.testing import make_tiny_model_dir
from scripts.benchmarks.proxies import DEADLINE_S, PROXIES, Proxy, find_program, running_proxy
from tests.e2e.conftest import Server

pytestmark = pytest.mark.system

NUM_RANKS = 4
NUM_CLIENTS = 6  # of each proxy
MAX_TOKENS = 20
ENDLESS = 900_000  # tokens; at 5 ms a step more than an hour
PATIENCE_S = 4 * DEADLINE_S  # for a number of answers while servers start, on a machine that is busy with both

each_proxy = pytest.mark.parametrize("name", sorted(PROXIES))


class Endpoints:
    """Four `gateway serve --data-parallel-external-lb`, each on a port of its own that it gets again."""

    def __init__(self, model: str, first_port: int) -> None:
        *self.ports, rpc_port = range(first_port, first_port + NUM_RANKS + 1)
        self._arguments = [
            model, "--engine", "simulated", "--data-parallel-backend", "mp", "--simulated", "step_ms=5",
            "-dp", str(NUM_RANKS), "--data-parallel-external-lb", "--data-parallel-rpc-port", str(rpc_port),
        ]  # fmt: skip
        self.servers: dict[int, Server] = {}

    def start(self, rank: int) -> None:
        self.servers[rank] = Server(*self._arguments, "--data-parallel-rank", str(rank), "--port", str(self.ports[rank]))

    def stop(self, rank: int) -> int:
        return self.servers.pop(rank).stop()

    async def start_all(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self.start, rank) for rank in range(NUM_RANKS)))

    def totals(self, name: str) -> int:
        return sum(server.status()["totals"][name] for server in self.servers.values())

    def are_idle(self) -> bool:
        return all(server.is_idle() for server in self.servers.values())


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory, port_range: Callable[[int], int]) -> Iterator[Endpoints]:
    model = make_tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny", max_model_len=1_000_000)
    endpoints = Endpoints(str(model), port_range(NUM_RANKS + 1))
    try:
        asyncio.run(endpoints.start_all())
        yield endpoints
    finally:
        for rank in list(endpoints.servers):
            endpoints.stop(rank)


@pytest.fixture(scope="module")
def proxies(
    endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory, port_range: Callable[[int], int]
) -> Iterator[dict[str, Proxy]]:
    """Those that are installed."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running_proxy(name, path, endpoints.ports, tmp_path_factory.mktemp(name), port_range(2)))
            for name in PROXIES
            if (path := find_program(name)) is not None
        }


@pytest.fixture
async def proxy(name: str, program: Callable[[str], str], proxies: dict[str, Proxy]) -> Proxy:
    program(name)  # skips the test where it is not installed
    await probed(proxies[name])
    return proxies[name]


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with session() as http:
        yield http


async def probed(*proxies: Proxy) -> None:
    """Until those that probe take all endpoints for up."""
    async with asyncio.timeout(DEADLINE_S):
        for proxy in proxies:
            while proxy.probes and await asyncio.to_thread(proxy.endpoints_up) != set(range(NUM_RANKS)):
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
    failures: list[str] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)  # ranks whose answers break off, when they have begun
    is_over: bool = False
    _answered: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(self._client(is_stream=number % 2 == 0))

    async def _client(self, *, is_stream: bool) -> None:
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

    async def more(self, number: int) -> None:
        wanted = self.answers.total() + number
        await self._until(lambda: self.answers.total() >= wanted)

    async def served_again_by(self, rank: int) -> None:
        before = self.answers[rank]
        await self._until(lambda: self.answers[rank] > before)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._answered:
            await self._answered.wait_for(condition)


@contextlib.asynccontextmanager
async def loads(http: aiohttp.ClientSession, proxies: Iterable[Proxy]) -> AsyncIterator[list[Load]]:
    """Load on each of the proxies at once."""
    all_loads = [Load(http, proxy.url) for proxy in proxies]
    async with asyncio.TaskGroup() as running:
        for load in all_loads:
            running.create_task(load.run())
        try:
            await everywhere(load.more(NUM_CLIENTS) for load in all_loads)
            yield all_loads
        finally:
            for load in all_loads:
                load.is_over = True


async def everywhere(waits: Iterable[Any]) -> None:
    await asyncio.gather(*waits)


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
        assert await stream.goes_on(1)
        return stream

    async def goes_on(self, events: int) -> bool:
        """False when its connection breaks before so many events have come. It never ends as if it were whole."""
        try:
            for _ in range(2 * events):  # each event has a line of data and an empty one
                assert await self._response.content.readline(), "the stream ended as if it were whole"
        except aiohttp.ClientPayloadError:
            return False
        return True

    def close(self) -> None:
        self._response.close()


@pytest.fixture(scope="module")
def rolling_restart(endpoints: Endpoints, proxies: dict[str, Proxy]) -> dict[str, Load]:
    """What clients of each proxy have seen while the endpoints were restarted, one after the other."""

    async def restart_all() -> list[Load]:
        async with session() as http, loads(http, proxies.values()) as running:
            for rank in range(NUM_RANKS):
                assert await asyncio.to_thread(endpoints.stop, rank) == 0
                await everywhere(load.more(2 * NUM_CLIENTS) for load in running)
                await asyncio.to_thread(endpoints.start, rank)
                await everywhere(load.served_again_by(rank) for load in running)
                await probed(*proxies.values())
        return running

    return dict(zip(proxies, asyncio.run(restart_all()), strict=True))


@each_proxy
def test_all_endpoints_are_restarted_under_load_without_a_failed_request(
    name: str, program: Callable[[str], str], rolling_restart: dict[str, Load]
) -> None:
    program(name)
    assert rolling_restart[name].failures == []
    assert set(rolling_restart[name].answers) == set(range(NUM_RANKS))


@dataclass
class Killing:
    """What clients of one proxy have seen of the death of an endpoint."""

    load: Load
    broken: int  # streams of the endpoint that was killed
    lost: int  # streams of the others that broke with it
    going_on: int  # streams of the others


@pytest.fixture(scope="module")
def killing(endpoints: Endpoints, proxies: dict[str, Proxy]) -> dict[str, Killing]:
    """An endpoint is killed with all that it has under way, and started again."""
    victim = 1

    async def kill_one() -> list[Killing]:
        async with session() as http, AsyncExitStack() as stack:
            streams = {name: [await Stream.open(http, proxy) for _ in range(4 * NUM_RANKS)] for name, proxy in proxies.items()}
            for stream in itertools.chain.from_iterable(streams.values()):
                stack.callback(stream.close)
            async with loads(http, proxies.values()) as running:
                for load in running:
                    load.killed.add(victim)
                endpoints.servers[victim].process.kill()
                await asyncio.to_thread(endpoints.stop, victim)
                await everywhere(load.more(2 * NUM_CLIENTS) for load in running)
                seen = [await look(load, opened) for load, opened in zip(running, streams.values(), strict=True)]
                await asyncio.to_thread(endpoints.start, victim)
                await everywhere(load.served_again_by(victim) for load in running)
            return seen

    async def look(load: Load, streams: list[Stream]) -> Killing:
        mortal = [stream for stream in streams if stream.rank == victim]
        others = [stream for stream in streams if stream.rank != victim]
        async with asyncio.timeout(PATIENCE_S):
            broken = [not await stream.goes_on(ENDLESS) for stream in mortal]
            going_on = await asyncio.gather(*(stream.goes_on(20) for stream in others))
        assert len(mortal) == sum(broken) > 0
        return Killing(load, sum(broken), going_on.count(False), going_on.count(True))

    return dict(zip(proxies, asyncio.run(kill_one()), strict=True))


@each_proxy
def test_an_endpoint_that_is_killed_costs_its_own_streams_alone(
    name: str, program: Callable[[str], str], killing: dict[str, Killing]
) -> None:
    program(name)
    seen = killing[name]
    assert seen.load.failures == []
    assert seen.lost == 0
    assert seen.broken + seen.going_on == 4 * NUM_RANKS


@each_proxy
async def test_an_endpoint_that_an_operator_drains_gets_nothing_new_and_keeps_its_streams(
    endpoints: Endpoints, proxy: Proxy, http: aiohttp.ClientSession
) -> None:
    stream = await Stream.open(http, proxy)
    rank, server = stream.rank, endpoints.servers[stream.rank]
    async with http.post(f"{server.url}/admin/ranks/{rank}/drain") as response:
        assert response.status == 200, await response.text()
    assert (await asyncio.to_thread(server.get, "/ready")).status_code == 503
    async with loads(http, [proxy]) as (load,):
        await load.more(4 * NUM_CLIENTS)
        assert load.answers[rank] == 0
        assert await stream.goes_on(20)
        async with http.post(f"{server.url}/admin/ranks/{rank}/undrain") as response:
            assert response.status == 200, await response.text()
        await load.served_again_by(rank)
    assert load.failures == []
    stream.close()


@each_proxy
async def test_clients_that_leave_free_the_engines(endpoints: Endpoints, proxy: Proxy, http: aiohttp.ClientSession) -> None:
    before = await asyncio.to_thread(endpoints.totals, "aborted")
    streams = await asyncio.gather(*(Stream.open(http, proxy) for _ in range(2 * NUM_RANKS)))
    assert len({stream.rank for stream in streams}) > 1
    for stream in streams:
        stream.close()
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(endpoints.are_idle):
            await asyncio.sleep(0.05)
    assert await asyncio.to_thread(endpoints.totals, "aborted") - before == len(streams)

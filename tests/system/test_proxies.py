"""What each proxy does with the configuration that we ship: real proxies in front of our HTTP server, whose engines say what
the test lets them say, when it lets them."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
import uvloop

from gateway.errors import OverloadedError
from gateway.status import RankStatus
from gateway.testing import FakeRequest, says, waits
from scripts.benchmarks.proxies import DEADLINE_S, PROXIES, Proxy
from tests.gateway.conftest import Served
from tests.gateway.conftest import serve as serve_fake

pytestmark = pytest.mark.system
__all__ = ["serve_fake"]  # a fixture

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello?"}]}
LONG_BYTES = {"nginx": 30_000_000, "haproxy": 200_000, "envoy": 10_000_000}  # requests that each can still send again
SILENCE_S = 65.0  # longer than every proxy's usual time-outs


@dataclass
class Fleet:
    """Four endpoints behind a proxy, and a client that knows the proxy alone."""

    endpoints: list[Served]
    proxy: Proxy
    http: aiohttp.ClientSession

    def say(self, text: str) -> None:
        """Every endpoint answers with this from now on."""
        for rank, endpoint in enumerate(self.endpoints):
            endpoint.engine.script = says(text, rank=rank)

    def hold(self) -> None:
        """Every endpoint waits for the test from now on."""
        for endpoint in self.endpoints:
            endpoint.engine.script = waits

    def post(self, *, stream: bool = False, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """An answer to come, as aiohttp has it."""
        data = io.BytesIO(json.dumps({**BODY, "stream": stream, **fields}).encode())
        return self.http.post(self.proxy.url + CHAT, data=data, headers={"Content-Type": "application/json", **(headers or {})})

    async def rank_of_answer(self, **headers: str) -> int:
        async with self.post(headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()
            return int(response.headers["X-Gateway-Rank"])

    async def ranks_of(self, number: int) -> Counter[int]:
        """Who answers so many requests that come one after the other."""
        return Counter([await self.rank_of_answer() for _ in range(number)])

    async def arrival(self, besides: Served | None = None) -> tuple[Served, FakeRequest]:
        """The only request that the endpoints hold, as soon as one of them has it."""
        waiting = {
            asyncio.create_task(endpoint.engine.next_request(len(endpoint.engine.requests))): endpoint
            for endpoint in self.endpoints
            if endpoint is not besides
        }
        done, others = await asyncio.wait(waiting, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        (task,) = done
        return waiting[task], task.result()


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """As front ends have it. asyncio's own loop forgets to close a connection that comes in the moment a server stops."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(params=sorted(PROXIES))
def proxy_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def fleet(proxy_name: str, serve_fake: Any, start_proxy: Callable[..., Proxy]) -> AsyncIterator[Fleet]:
    endpoints = [await serve_fake() for _ in range(4)]
    proxy = await asyncio.to_thread(start_proxy, proxy_name, [endpoint.port for endpoint in endpoints])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        fleet = Fleet(endpoints, proxy, http)
        fleet.say("Hello, big world")
        if proxy.probes:
            await up(proxy, {0, 1, 2, 3})
        yield fleet
    await asyncio.to_thread(proxy.stop)  # before the endpoints, which need no patience with its connections


async def up(proxy: Proxy, expected: set[int]) -> None:
    """Until the proxy takes exactly these for up. They stay so, or the test has failed already."""
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(proxy.endpoints_up) != expected:
            await asyncio.sleep(0.05)


async def test_a_token_reaches_the_client_before_the_next_is_made(fleet: Fleet) -> None:
    fleet.hold()
    answer = asyncio.create_task(fleet.post(stream=True).__aenter__())
    _, request = await fleet.arrival()
    request.put("one")
    async with await answer as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        for word in ("one", " two", " three"):
            # The engine says the next word only after this one has arrived: what is held back anywhere is held for ever.
            await read_until(response, json.dumps(word)[1:-1].encode())
            request.put({"one": " two", " two": " three", " three": " end"}[word], finish_reason=None)
        request.put("", finish_reason="stop")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def read_until(response: aiohttp.ClientResponse, text: bytes) -> None:
    seen = b""
    while text not in seen:
        piece = await response.content.readany()
        assert piece, f"the stream ended without {text!r}: {seen!r}"
        seen += piece


@pytest.mark.parametrize("after_tokens", [False, True], ids=["before its first token", "in its stream"])
async def test_a_client_that_leaves_ends_its_request_in_the_engine(fleet: Fleet, after_tokens: bool) -> None:
    fleet.hold()
    answer = asyncio.create_task(fleet.post(stream=True).__aenter__())
    endpoint, request = await fleet.arrival()
    if after_tokens:
        request.put("one")
        response = await answer
        await read_until(response, b"one")
        response.close()
    else:
        answer.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await request.ended.wait()
    assert endpoint.engine.aborted == [request.request_id]


async def test_requests_of_a_session_go_to_one_endpoint_and_move_together_when_it_ends(fleet: Fleet) -> None:
    sessions = [f"session-{i}" for i in range(16)]

    async def homes() -> dict[str, int]:
        ranks = await asyncio.gather(*(fleet.rank_of_answer(**{"X-Session-Id": session}) for session in sessions))
        return dict(zip(sessions, ranks, strict=True))

    first = await homes()
    assert len(set(first.values())) > 1, "all sessions at one endpoint"
    assert [await homes() for _ in range(3)] == [first] * 3
    lost = first[sessions[0]]
    await fleet.endpoints[lost].server.stop()
    second = await homes()
    assert lost not in second.values()
    stayed = {session: rank for session, rank in first.items() if rank != lost}
    assert {session: second[session] for session in stayed} == stayed
    assert await homes() == second


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
async def test_a_request_that_an_endpoint_refuses_is_served_by_another(fleet: Fleet, is_long: bool) -> None:
    for endpoint in fleet.endpoints[:3]:
        endpoint.engine.overload = OverloadedError("the server is shutting down")
    for _ in range(8):
        async with fleet.post(user="x" * (LONG_BYTES[fleet.proxy.program] if is_long else 10)) as response:
            assert (response.status, response.headers.get("X-Gateway-Rank")) == (200, "3"), await response.text()


async def test_when_all_refuse_the_client_is_told_to_come_back_and_is_served_once_there_is_room(fleet: Fleet) -> None:
    for endpoint in fleet.endpoints:
        endpoint.engine.overload = OverloadedError("too many requests are queued")
    if fleet.proxy.probes:
        await up(fleet.proxy, set())
    for _ in range(8):
        async with fleet.post() as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "overloaded_error"
    for endpoint in fleet.endpoints:
        endpoint.engine.overload = None
    async with asyncio.timeout(DEADLINE_S):
        while await status_of(fleet) != 200:
            await asyncio.sleep(0.1)


async def test_a_request_refused_when_no_endpoint_is_up_any_more_gets_an_answer_and_no_closed_connection(fleet: Fleet) -> None:
    assert sum((await fleet.ranks_of(8)).values()) == 8  # connections are kept from now on, and the next request goes over one
    fleet.hold()
    answer = asyncio.create_task(fleet.post(headers={"X-Session-Id": "alice"}).__aenter__())
    _, request = await fleet.arrival()
    for endpoint in fleet.endpoints:
        endpoint.engine.overload = OverloadedError("too many requests are queued")
    if fleet.proxy.probes:
        await up(fleet.proxy, set())
    request.fail(OverloadedError("too many requests are queued"))
    async with await answer as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "overloaded_error"
    for endpoint in fleet.endpoints:
        endpoint.engine.overload = None
    fleet.say("Hello")
    if fleet.proxy.probes:
        await up(fleet.proxy, {0, 1, 2, 3})
    async with asyncio.timeout(DEADLINE_S):
        while await status_of(fleet, "alice") != 200:  # nginx gives endpoints that refused a second of rest
            await asyncio.sleep(0.1)


async def status_of(fleet: Fleet, session: str = "bob") -> int:
    async with fleet.post(headers={"X-Session-Id": session}) as response:
        return response.status


def break_connections(endpoint: Served) -> None:
    """As the kernel does for a process that was killed."""
    for protocol in endpoint.state.busy_connections:
        protocol.transport.abort()  # type: ignore[attr-defined]


async def test_a_request_whose_endpoint_dies_before_its_first_token_is_served_by_another(fleet: Fleet) -> None:
    fleet.hold()
    answer = asyncio.create_task(fleet.post(stream=True).__aenter__())
    first, _ = await fleet.arrival()
    again = asyncio.create_task(fleet.arrival(besides=first))
    break_connections(first)
    _, request = await again
    request.put("Hello", finish_reason="stop")
    async with await answer as response:
        assert response.status == 200
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_whose_endpoint_dies_ends_as_broken_and_not_as_done(fleet: Fleet) -> None:
    fleet.hold()
    answer = asyncio.create_task(fleet.post(stream=True).__aenter__())
    endpoint, request = await fleet.arrival()
    request.put("one")
    async with await answer as response:
        await read_until(response, b"one")
        break_connections(endpoint)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.parametrize("proxy_name", ["envoy", "haproxy"], indirect=True)
async def test_an_endpoint_that_is_not_ready_gets_nothing_new_and_keeps_its_streams(fleet: Fleet) -> None:
    fleet.hold()
    answer = asyncio.create_task(fleet.post(stream=True).__aenter__())
    endpoint, request = await fleet.arrival()
    request.put("one")
    async with await answer as response:
        await read_until(response, b"one")
        rank = fleet.endpoints.index(endpoint)
        endpoint.engine.state = "draining"  # and `overload` not set: who sends something gets it served
        await up(fleet.proxy, {0, 1, 2, 3} - {rank})
        fleet.say("Hello")
        assert rank not in await fleet.ranks_of(16)
        request.put(" two", finish_reason="stop")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    endpoint.engine.state = "ready"
    await up(fleet.proxy, {0, 1, 2, 3})
    assert rank in await fleet.ranks_of(16)


@pytest.mark.parametrize("proxy_name", ["envoy", "haproxy"], indirect=True)
async def test_an_endpoint_that_hangs_is_noticed_without_a_request_that_waits_for_it(
    proxy_name: str, serve_fake: Any, start_proxy: Callable[..., Proxy]
) -> None:
    endpoints = [await serve_fake() for _ in range(4)]
    ports = [endpoint.port for endpoint in endpoints]
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel takes connections, and nobody answers
        ports[2] = hanging.getsockname()[1]
        proxy = await asyncio.to_thread(start_proxy, proxy_name, ports)
        await up(proxy, {0, 1, 3})
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
            fleet = Fleet(endpoints, proxy, http)
            fleet.say("Hello")
            assert set(await fleet.ranks_of(16)) <= {0, 1, 3}
        await asyncio.to_thread(proxy.stop)


async def test_a_request_does_not_go_again_and_again_to_an_endpoint_that_is_idle_because_it_refuses(fleet: Fleet) -> None:
    fleet.hold()
    answers = []
    for _ in range(12):
        answers.append(asyncio.create_task(fleet.post(stream=True).__aenter__()))
        await fleet.arrival()
    idle = fleet.endpoints[0]
    for request in idle.engine.requests:
        request.put("Hello", finish_reason="stop")
    idle.engine.overload = OverloadedError("the server is shutting down")
    fleet.say("Hello")
    assert 0 not in await fleet.ranks_of(16)
    for answer in answers:
        answer.cancel()


@pytest.mark.parametrize("proxy_name", ["haproxy", "nginx"], indirect=True)  # Envoy draws before it looks
async def test_a_request_goes_where_the_fewest_are_under_way(fleet: Fleet) -> None:
    fleet.hold()
    answers = []
    for number in range(1, 9):
        answers.append(asyncio.create_task(fleet.post(stream=True).__aenter__()))
        await fleet.arrival()
        counts = [len(endpoint.engine.requests) for endpoint in fleet.endpoints]
        assert sum(counts) == number
        assert max(counts) - min(counts) <= 1, counts
    for answer in answers:
        answer.cancel()


async def test_envoy_weighs_endpoints_by_the_load_that_their_answers_report_where_it_is_told_to(
    serve_fake: Any, start_proxy: Callable[..., Proxy]
) -> None:
    endpoints = [await serve_fake() for _ in range(4)]
    slots = endpoints[0].state.config.engine.max_num_seqs
    for rank, endpoint in enumerate(endpoints):
        running = slots if rank == 0 else slots // 8
        endpoint.engine.ranks = (replace(RankStatus(rank=0, epoch=1, state="ready"), running=running),)
    by_load = {"cluster: by_requests": "cluster: by_load"}
    proxy = await asyncio.to_thread(start_proxy, "envoy", [endpoint.port for endpoint in endpoints], by_load)
    await up(proxy, {0, 1, 2, 3})
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        fleet = Fleet(endpoints, proxy, http)
        fleet.say("Hello")

        async def shares() -> Counter[int]:
            return Counter(await asyncio.gather(*(fleet.rank_of_answer() for _ in range(64))))

        async with asyncio.timeout(DEADLINE_S):
            while (counts := await shares())[0] * 4 > min(counts[rank] for rank in (1, 2, 3)):
                await asyncio.sleep(0.1)
    await asyncio.to_thread(proxy.stop)


@pytest.mark.parametrize(
    "path", ["/status", "/metrics", "/admin/ranks/0/drain", "/v1/load_lora_adapter", "/pause", "/v1/../admin"]
)
async def test_what_is_for_one_endpoint_is_closed_to_clients(fleet: Fleet, path: str) -> None:
    async with fleet.http.post(fleet.proxy.url + path, json={}) as response:
        assert response.status == 404
    async with fleet.http.get(fleet.proxy.url + "/health") as response:
        assert response.status == 200


@pytest.mark.long
async def test_a_prompt_that_is_computed_for_longer_than_a_minute_is_answered(
    serve_fake: Any, start_proxy: Callable[..., Proxy]
) -> None:
    endpoints = [await serve_fake(waits) for _ in range(4)]
    proxies = [await asyncio.to_thread(start_proxy, name, [endpoint.port for endpoint in endpoints]) for name in PROXIES]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10 * SILENCE_S)) as http:
        fleets = [Fleet(endpoints, proxy, http) for proxy in proxies]
        held = []
        for fleet in fleets:
            answer = asyncio.create_task(fleet.post(stream=True).__aenter__())
            held.append((answer, (await fleet.arrival())[1]))
        await asyncio.sleep(SILENCE_S)
        for answer, request in held:
            request.put("Hello")
            await read_until(await answer, b"Hello")
        await asyncio.sleep(SILENCE_S)
        for answer, request in held:
            request.put(" world", finish_reason="stop")
            assert (await (await answer).read()).endswith(b"data: [DONE]\n\n")
    assert sum(len(endpoint.engine.requests) for endpoint in endpoints) == len(proxies)
    for proxy in proxies:
        await asyncio.to_thread(proxy.stop)

"""Several front-end processes on one port answer as one endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import ANSWER_TIMEOUT_S, wait_for

Serve = Callable[..., Any]
Poll = Callable[..., Any]


async def ask(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Over a connection of its own, so that any front end may get it."""
    body = {"model": "tiny", "prompt": "one two three", "temperature": 0, "ignore_eos": True, "max_tokens": 5} | fields
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def fill_both(server: Any, poll: Poll, **fields: Any) -> tuple[list[asyncio.Task[tuple[int, dict[str, Any]]]], list[int]]:
    """Requests until each of two front ends has some, and how many each has. The kernel could give all to one."""
    requests: list[asyncio.Task[tuple[int, dict[str, Any]]]] = []

    def in_flight() -> list[int] | None:
        counts = [front_end["in_flight"] for front_end in server.status()["front_ends"]]
        return counts if len(counts) == 2 and sum(counts) == len(requests) else None

    counts = [0, 0]
    while min(counts) == 0:
        assert len(requests) < 100, counts
        requests += [asyncio.create_task(ask(server.url, **fields)) for _ in range(8)]
        counts = await asyncio.to_thread(poll, in_flight, "all are in flight")
    return requests, counts


async def test_counters_are_those_of_the_endpoint_whoever_answers(serve: Serve, simulated: list[str], poll: Poll) -> None:
    server = serve(*simulated, "-dp", "2", "--api-server-count", "2")
    answers = await asyncio.gather(*(ask(server.url) for _ in range(40)))
    assert [answer for status, answer in answers if status != 200] == []

    def agrees() -> bool:
        statuses = [server.status() for _ in range(6)]
        return all(
            status["totals"]["requests"] == 40
            and status["totals"]["generation_tokens"] == 200
            and [front_end["index"] for front_end in status["front_ends"]] == [0, 1]
            and sum(rank["requests_total"] for rank in status["ranks"]) == 40
            for status in statuses
        )

    await asyncio.to_thread(poll, agrees, "every front end counts 40 requests")
    assert 'request_success_total{engine="0",finished_reason="length"' in server.get("/metrics").text


async def test_a_killed_front_end_costs_its_own_connections_only_and_no_counter_goes_back(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "--api-server-count", "2")
    await asyncio.gather(*(ask(server.url) for _ in range(20)))

    def is_published() -> bool:
        """The other one says so: what front end 0 alone knows dies with it."""
        status = server.status()
        age_s = next(f["age_s"] for f in status["front_ends"] if f["index"] == 0)
        return age_s > 0 and status["totals"]["requests"] == 20

    await asyncio.to_thread(poll, is_published, "all are counted")
    rank_pid = server.rank(0)["pid"]
    front_ends = {f["index"]: f["pid"] for f in server.status()["front_ends"]}
    os.kill(front_ends[0], signal.SIGKILL)

    def is_replaced() -> bool:
        pids = {f["index"]: f["pid"] for f in server.status()["front_ends"]}
        return pids.get(0) not in (None, front_ends[0]) and pids[1] == front_ends[1]

    await asyncio.to_thread(poll, is_replaced, "front end 0 is replaced")
    answers = await asyncio.gather(*(ask(server.url) for _ in range(20)))
    assert [answer for status, answer in answers if status != 200] == []
    await asyncio.to_thread(poll, lambda: server.status()["totals"]["requests"] == 40, "no count was lost")
    assert server.rank(0)["pid"] == rank_pid
    assert server.rank(0)["restarts"] == 0


async def test_a_stopped_front_end_stops_neither_the_others_streams_nor_a_rank(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "step_ms=5", "-dp", "2", "--api-server-count", "2")
    with server.frozen():
        streams, counts = await fill_both(server, poll, max_tokens=300)
        stopped = next(f for f in server.status()["front_ends"] if f["index"] == 0)["pid"]
        os.kill(stopped, signal.SIGSTOP)
    try:
        # The other's go on to their end.
        while sum(stream.done() for stream in streams) < counts[1]:
            going_on = [stream for stream in streams if not stream.done()]
            await asyncio.wait_for(asyncio.wait(going_on, return_when=asyncio.FIRST_COMPLETED), ANSWER_TIMEOUT_S)
        # A connection that the kernel had given to the stopped one may wait; every other is served, by both ranks.
        answers = await asyncio.gather(*(asyncio.wait_for(ask(server.url, max_tokens=50), ANSWER_TIMEOUT_S) for _ in range(10)))
        assert [answer for status, answer in answers if status != 200] == []
    finally:
        os.kill(stopped, signal.SIGCONT)
    # What ranks had for the stopped one was kept: its streams are whole, too.
    ends = await asyncio.wait_for(asyncio.gather(*streams), ANSWER_TIMEOUT_S)
    assert [answer["usage"]["completion_tokens"] for _, answer in ends] == [300] * len(streams)

    def are_ready() -> bool:
        return [(rank["state"], rank["restarts"]) for rank in server.status()["ranks"]] == [("ready", 0)] * 2

    await asyncio.to_thread(poll, are_ready, "no rank has come to harm")


async def test_sigterm_drains_every_front_end(serve: Serve, slow_simulated: list[str], poll: Poll) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--api-server-count", "2", "--shutdown-timeout", "600")
    with server.frozen():
        streams, _ = await fill_both(server, poll, max_tokens=400)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(poll, lambda: sum(": draining " in line for line in server.stderr) == 2, "both are draining")
    refused = await asyncio.gather(*(ask(server.url) for _ in range(8)))
    assert [status for status, _ in refused] == [503] * 8
    server.set_step_ms(2)
    ends = await asyncio.wait_for(asyncio.gather(*streams), ANSWER_TIMEOUT_S)
    assert [(status, end["usage"]["completion_tokens"]) for status, end in ends] == [(200, 400)] * len(streams)
    assert await asyncio.to_thread(server.process.wait, ANSWER_TIMEOUT_S) == 0
    assert server.alive() == []


async def test_an_abort_by_id_reaches_every_front_end_and_so_does_the_load(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "step_ms=20", "--api-server-count", "2", "--dev-mode")
    asked = [asyncio.create_task(ask_as(server.url, "mine", max_tokens=8000)) for _ in range(8)]
    await asyncio.to_thread(poll, lambda: server.get("/load").json() == {"server_load": 8}, "all are under way")
    front_ends = {f["index"]: f["in_flight"] for f in server.status()["front_ends"]}
    body = {"request_ids": ["mine"]}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/abort_requests", json=body) as response:
        assert response.status == 200
    ends = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["abort"] * 8, front_ends
    await asyncio.to_thread(poll, lambda: server.get("/load").json() == {"server_load": 0}, "nothing is under way")


async def test_a_client_cancels_its_request_through_whichever_front_end(serve: Serve, simulated: list[str], poll: Poll) -> None:
    server = serve(*simulated, "step_ms=20", "--api-server-count", "3")
    asked = [asyncio.create_task(ask_as(server.url, str(i), max_tokens=8000)) for i in range(12)]
    await asyncio.to_thread(poll, lambda: server.num_in_flight() == 12, "all are in flight")
    for status in (200, 404):
        answers = await asyncio.gather(*(cancel(server.url, str(i)) for i in range(12)))
        assert answers == [status] * 12
    ends = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["abort"] * 12


async def ask_as(url: str, request_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "one", "ignore_eos": True} | fields
    async with (
        aiohttp.ClientSession(headers={"X-Request-Id": request_id}) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        document: dict[str, Any] = await response.json()
        return document


async def cancel(url: str, request_id: str) -> int:
    async with aiohttp.ClientSession() as session, session.delete(f"{url}/v1/requests/{request_id}") as response:
        return response.status


async def test_the_admission_limit_is_one_for_all_front_ends(serve: Serve, simulated: list[str]) -> None:
    server = serve(*simulated, "--api-server-count", "2", "--max-num-queued-requests", "6")
    with server.frozen():
        waiting = {asyncio.create_task(ask(server.url)) for _ in range(30)}
        refused: set[asyncio.Task[tuple[int, dict[str, Any]]]] = set()
        while len(refused) < 24:
            done, waiting = await asyncio.wait(waiting, timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            assert done, f"{len(refused)} are refused"
            refused |= done
    assert {task.result()[0] for task in refused} == {503}
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 6


@pytest.mark.parametrize("num_front_ends", [1, 4])
async def test_bursts_are_balanced_however_many_front_ends_choose(
    serve: Serve, simulated: list[str], num_front_ends: int, poll: Poll
) -> None:
    # Steps long enough that a busy machine changes what the ranks' speeds are measured to be by little: a slow one gets less.
    server = serve(*simulated, "step_ms=50", "-dp", "3", "--api-server-count", str(num_front_ends))
    burst, before = 200, [0, 0, 0]
    for _ in range(2):
        with server.frozen():  # a rank that is slower today would get less
            asking = [asyncio.create_task(ask(server.url, prompt=f"prompt {i}", max_tokens=20)) for i in range(burst)]
            await asyncio.to_thread(poll, lambda: server.num_in_flight() == burst, "all are in flight")
        answers = await asyncio.gather(*asking)
        assert [answer for status, answer in answers if status != 200] == []
        counts = await asyncio.to_thread(requests_by_rank, server, sum(before) + burst)
        shares = [now - then for now, then in zip(counts, before, strict=True)]
        # Not a third each: they still differ.
        assert min(shares) >= burst // 6, shares
        before = counts


def requests_by_rank(server: Any, total: int) -> list[int]:
    """Once they are all counted: what another front end has done is known a moment later."""

    def counts() -> list[int] | None:
        found = [rank["requests_total"] for rank in server.status()["ranks"]]
        return found if sum(found) == total else None

    return list(wait_for(counts, f"{total} requests are counted"))

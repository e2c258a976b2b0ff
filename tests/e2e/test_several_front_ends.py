"""Several front-end processes on one port answer as one endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import wait_for

Serve = Callable[..., Any]
Poll = Callable[..., Any]


async def ask(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Over a connection of its own, so that any front end may get it."""
    body = {"model": "tiny", "prompt": "one two three", "temperature": 0, "ignore_eos": True, "max_tokens": 5} | fields
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()


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

    await asyncio.to_thread(poll, agrees, "every front end counts 40 requests", 10)
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

    await asyncio.to_thread(poll, is_published, "all are counted", 10)
    rank_pid = server.rank(0)["pid"]
    front_ends = {f["index"]: f["pid"] for f in server.status()["front_ends"]}
    os.kill(front_ends[0], signal.SIGKILL)

    def is_replaced() -> bool:
        pids = {f["index"]: f["pid"] for f in server.status()["front_ends"]}
        return pids.get(0) not in (None, front_ends[0]) and pids[1] == front_ends[1]

    await asyncio.to_thread(poll, is_replaced, "front end 0 is replaced", 30)
    answers = await asyncio.gather(*(ask(server.url) for _ in range(20)))
    assert [answer for status, answer in answers if status != 200] == []
    await asyncio.to_thread(poll, lambda: server.status()["totals"]["requests"] == 40, "no count was lost", 10)
    assert server.rank(0)["pid"] == rank_pid
    assert server.rank(0)["restarts"] == 0


async def test_a_stopped_front_end_stops_neither_the_others_streams_nor_a_rank(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "step_ms=5", "-dp", "2", "--api-server-count", "2")
    streams = [asyncio.create_task(ask(server.url, max_tokens=800)) for _ in range(16)]

    def in_flight() -> dict[int, int]:
        return {f["index"]: f["in_flight"] for f in server.status()["front_ends"]}

    def both_have_some_of_all() -> Any:
        counts = in_flight()
        # Of both: the other's row comes a moment later, and one alone could have all.
        return counts if len(counts) == 2 and sum(counts.values()) == 16 and min(counts.values()) > 0 else None

    counts = await asyncio.to_thread(poll, both_have_some_of_all, "both front ends have streams")
    stopped = next(f for f in server.status()["front_ends"] if f["index"] == 0)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        # The other's go on to their end.
        while sum(stream.done() for stream in streams) < counts[1]:
            await asyncio.wait_for(asyncio.wait([s for s in streams if not s.done()], return_when=asyncio.FIRST_COMPLETED), 60)
        # A connection that the kernel had given to the stopped one may wait; every other is served, by both ranks.
        answers = await asyncio.gather(*(asyncio.wait_for(ask(server.url, max_tokens=200), 60) for _ in range(10)))
        assert [answer for status, answer in answers if status != 200] == []
    finally:
        os.kill(stopped, signal.SIGCONT)
    # What ranks had for the stopped one was kept: its streams are whole, too.
    ends = await asyncio.wait_for(asyncio.gather(*streams), 60)
    assert [answer["usage"]["completion_tokens"] for _, answer in ends] == [800] * 16
    assert [(rank["state"], rank["restarts"]) for rank in server.status()["ranks"]] == [("ready", 0)] * 2


async def test_an_abort_by_id_reaches_every_front_end_and_so_does_the_load(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "--api-server-count", "2", "--dev-mode")

    async def ask_with_id() -> str:
        body = {"model": "tiny", "prompt": "one", "ignore_eos": True, "max_tokens": 8000}
        async with (
            aiohttp.ClientSession(headers={"X-Request-Id": "mine"}) as session,
            session.post(f"{server.url}/v1/completions", json=body) as response,
        ):
            reason: str = (await response.json())["choices"][0]["finish_reason"]
            return reason

    asked = [asyncio.create_task(ask_with_id()) for _ in range(8)]
    await asyncio.to_thread(poll, lambda: server.get("/load").json() == {"server_load": 8}, "all are under way")
    front_ends = {f["index"]: f["in_flight"] for f in server.status()["front_ends"]}
    body = {"request_ids": ["mine"]}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/abort_requests", json=body) as response:
        assert response.status == 200
    assert await asyncio.wait_for(asyncio.gather(*asked), 30) == ["abort"] * 8, front_ends
    await asyncio.to_thread(poll, lambda: server.get("/load").json() == {"server_load": 0}, "nothing is under way")


async def test_the_admission_limit_is_one_for_all_front_ends(serve: Serve, simulated: list[str]) -> None:
    # Six of these take three seconds: all others have come by then, also on a busy machine.
    server = serve(*simulated, "step_ms=30", "--api-server-count", "2", "--max-num-queued-requests", "6")
    answers = await asyncio.gather(*(ask(server.url, max_tokens=100) for _ in range(30)))
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) == 6


@pytest.mark.parametrize("num_front_ends", [1, 4])
async def test_bursts_are_balanced_however_many_front_ends_choose(
    serve: Serve, simulated: list[str], num_front_ends: int
) -> None:
    server = serve(*simulated, "-dp", "3", "--api-server-count", str(num_front_ends))
    burst, before = 200, [0, 0, 0]
    for _ in range(2):
        answers = await asyncio.gather(*(ask(server.url, prompt=f"prompt {i}", max_tokens=20) for i in range(burst)))
        assert [answer for status, answer in answers if status != 200] == []
        counts = await asyncio.to_thread(requests_by_rank, server, sum(before) + burst)
        shares = [now - then for now, then in zip(counts, before, strict=True)]
        assert min(shares) >= burst // 4, shares
        before = counts


def requests_by_rank(server: Any, total: int) -> list[int]:
    """Once they are all counted: what another front end has done is known a moment later."""

    def counts() -> list[int] | None:
        found = [rank["requests_total"] for rank in server.status()["ranks"]]
        return found if sum(found) == total else None

    return list(wait_for(counts, f"{total} requests are counted"))

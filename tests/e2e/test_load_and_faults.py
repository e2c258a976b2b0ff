"""Two ranks under load: spread, disconnects, a killed rank, a drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from tests.e2e.conftest import ANSWER_TIMEOUT_S, SLOW_MS

FAST_MS = 2
Serve = Callable[..., Any]
Poll = Callable[..., Any]


@contextlib.asynccontextmanager
async def completion(session: aiohttp.ClientSession, url: str, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"model": "tiny", "prompt": "one two three", "temperature": 0, "ignore_eos": True, "stream": True} | fields
    async with session.post(f"{url}/v1/completions", json=body) as response:
        yield response


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | str]:
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data:
            yield data if data == "[DONE]" else json.loads(data)


async def whole(session: aiohttp.ClientSession, url: str, **fields: Any) -> dict[str, Any]:
    async with completion(session, url, stream=False, **fields) as response:
        return {"status": response.status, "rank": response.headers.get("X-Gateway-Rank"), **await response.json()}


def client_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S))


async def test_a_hundred_requests_get_exact_counts_and_use_both_ranks(serve: Serve, simulated: list[str], poll: Poll) -> None:
    server = serve(*simulated, "-dp", "2")
    lengths = [1 + (7 * i) % 40 for i in range(100)]
    async with client_session() as session:
        with server.frozen():  # a rank that is slower today would get less
            asking = [asyncio.create_task(whole(session, server.url, max_tokens=n, prompt="word " * (1 + n))) for n in lengths]
            await asyncio.to_thread(poll, lambda: server.num_in_flight() == 100, "all are in flight")
        answers = await asyncio.gather(*asking)
    assert [a["usage"]["completion_tokens"] for a in answers] == lengths
    ranks = [a["rank"] for a in answers]
    assert min(ranks.count("0"), ranks.count("1")) >= 33
    await asyncio.to_thread(poll, server.is_idle, "both sides are empty")


async def test_the_answer_of_a_request_is_the_same_on_every_rank(serve: Serve, simulated: list[str], poll: Poll) -> None:
    server = serve(*simulated, "-dp", "2")
    async with client_session() as session:
        with server.frozen():
            fields = {"max_tokens": 12, "temperature": 0.8, "seed": 7}
            asking = [asyncio.create_task(whole(session, server.url, **fields)) for _ in range(8)]
            await asyncio.to_thread(poll, lambda: server.num_in_flight() == 8, "all are in flight")
        answers = await asyncio.gather(*asking)
    assert {a["rank"] for a in answers} == {"0", "1"}
    assert len({a["choices"][0]["text"] for a in answers}) == 1


async def test_a_client_that_leaves_after_five_tokens_frees_its_rank_and_the_ledger(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "step_ms=20", "-dp", "2")
    async with client_session() as session:
        for _ in range(3):
            async with completion(session, server.url, max_tokens=8000) as response:
                seen = 0
                async for event in events(response):
                    seen += event != "[DONE]"
                    if seen == 5:
                        response.close()
                        break
        await asyncio.to_thread(poll, server.is_idle, "both ranks are idle")
    assert server.status()["totals"]["aborted"] == 3


async def read_to_the_end(session: aiohttp.ClientSession, url: str, started: asyncio.Event, **fields: Any) -> dict[str, Any]:
    """Reads a whole stream and says how it ended."""
    text, reason, error, done, usage = "", None, None, False, {}
    async with completion(session, url, **fields) as response:
        rank = response.headers.get("X-Gateway-Rank")
        async for event in events(response):
            started.set()
            if event == "[DONE]":
                done = True
            elif "error" in event:
                error = event["error"]
            elif event["choices"]:
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
            else:
                usage = event["usage"]
    return {"rank": rank, "text": text, "reason": reason, "error": error, "done": done, "usage": usage}


async def start_streams(
    session: aiohttp.ClientSession, url: str, count: int, **fields: Any
) -> list[asyncio.Task[dict[str, Any]]]:
    """Streams that all have begun; every other one is sampled."""
    started = [asyncio.Event() for _ in range(count)]
    streams = [asyncio.create_task(read_to_the_end(session, url, e, **stream(i), **fields)) for i, e in enumerate(started)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), ANSWER_TIMEOUT_S)
    return streams


def stream(i: int) -> dict[str, Any]:
    sampling = {"temperature": 0.9, "seed": i} if i % 2 else {"temperature": 0}
    return {"prompt": f"stream {i}", **sampling}


async def test_kill_9_of_a_rank_costs_no_stream_a_token(serve: Serve, slow_simulated: list[str], poll: Poll) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--engine-restarts", "0")
    server.set_step_ms(FAST_MS)
    async with client_session() as session:
        undisturbed = await asyncio.gather(*(whole(session, server.url, max_tokens=400, **stream(i)) for i in range(16)))
        server.set_step_ms(SLOW_MS)
        streams = await start_streams(session, server.url, 16, max_tokens=400, stream_options={"include_usage": True})
        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        await asyncio.to_thread(poll, lambda: server.rank(0)["state"] == "dead", "rank 0 is shown dead")
        server.set_step_ms(FAST_MS)
        ends = await asyncio.gather(*streams)
        assert [end["text"] for end in ends] == [answer["choices"][0]["text"] for answer in undisturbed]
        assert all(end["reason"] == "length" and end["done"] for end in ends)
        assert "signal 9" in server.rank(0)["death_cause"]
        after = await asyncio.gather(*(whole(session, server.url, max_tokens=3) for _ in range(6)))
    assert {a["rank"] for a in after} == {"1"}
    assert server.get("/health").status_code == 200
    status = server.status()
    assert status["state"] == "degraded"
    assert status["totals"]["failed"] == 0
    assert status["totals"]["moved"] == status["ranks"][0]["requests_moved_away"] == status["ranks"][1]["requests_moved_in"] > 0
    # Whose answer has moved is told so.
    assert {end["usage"].get("num_moves", 0) for end in ends if end["rank"] == "0"} <= {0, 1}
    assert sum(end["usage"].get("num_moves", 0) for end in ends) == status["totals"]["moved"]
    assert {"death", "move"} <= {event["kind"] for event in status["events"]}


async def test_requests_of_the_only_rank_wait_for_its_next_life_and_so_do_new_ones(
    serve: Serve, slow_simulated: list[str], poll: Poll
) -> None:
    server = serve(*slow_simulated)
    server.set_step_ms(FAST_MS)
    async with client_session() as session:
        undisturbed = await asyncio.gather(*(whole(session, server.url, max_tokens=400, **stream(i)) for i in range(6)))
        server.set_step_ms(SLOW_MS)
        streams = await start_streams(session, server.url, 6, max_tokens=400)
        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        asking = asyncio.create_task(whole(session, server.url, max_tokens=400, **stream(0)))
        await asyncio.to_thread(poll, lambda: is_ready_in_epoch(server, 0, 2), "its next life")
        server.set_step_ms(FAST_MS)
        late = await asking
        ends = await asyncio.gather(*streams)
    assert [end["text"] for end in ends] == [answer["choices"][0]["text"] for answer in undisturbed]
    assert late["choices"][0]["text"] == undisturbed[0]["choices"][0]["text"]
    assert server.get("/health").status_code == 200


def is_ready_in_epoch(server: Any, rank: int, epoch: int) -> bool:
    row = server.rank(rank)
    return bool((row["state"], row["epoch"]) == ("ready", epoch))


async def test_without_failover_a_dead_rank_ends_its_own_requests_only(
    serve: Serve, slow_simulated: list[str], poll: Poll
) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--engine-restarts", "0", "--no-failover")
    async with client_session() as session:
        streams = await start_streams(session, server.url, 8, max_tokens=400)
        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        await asyncio.to_thread(poll, lambda: server.rank(0)["state"] == "dead", "rank 0 is shown dead")
        server.set_step_ms(FAST_MS)
        ends = await asyncio.gather(*streams)
    lost = [end for end in ends if end["rank"] == "0"]
    kept = [end for end in ends if end["rank"] == "1"]
    assert lost
    assert kept
    assert all(end["error"] is not None and "rank 0" in end["error"]["message"] and not end["done"] for end in lost)
    assert all(end["reason"] == "length" and end["done"] and end["error"] is None for end in kept)
    assert server.status()["totals"]["failed"] == len(lost)


async def test_death_of_the_only_rank_fails_requests_with_the_cause_and_ends_the_server(
    serve: Serve, slow_simulated: list[str]
) -> None:
    server = serve(*slow_simulated, "--engine-restarts", "0")
    async with client_session() as session:
        (stream,) = await start_streams(session, server.url, 1, max_tokens=400)
        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        end = await asyncio.wait_for(stream, ANSWER_TIMEOUT_S)
    assert "rank 0" in end["error"]["message"]
    assert not end["done"]
    assert await asyncio.to_thread(server.process.wait, 100) != 0


async def test_a_server_that_is_kept_alive_says_503_after_its_only_rank_died_until_an_order_brings_it_back(
    serve: Serve, simulated: list[str], poll: Poll
) -> None:
    server = serve(*simulated, "--engine-restarts", "0", env={"GATEWAY_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    os.kill(server.rank(0)["pid"], signal.SIGKILL)
    await asyncio.to_thread(poll, lambda: server.get("/health").status_code == 503, "/health says 503")
    async with client_session() as session:
        answer = await whole(session, server.url, max_tokens=3)
    assert answer["status"] == 503
    assert "dead" in answer["error"]["message"] or "died" in answer["error"]["message"]
    assert server.status()["state"] == "dead"
    async with client_session() as session, session.post(f"{server.url}/admin/ranks/0/restart") as restarted:
        row = await restarted.json()
    assert (restarted.status, row["state"], row["epoch"]) == (200, "ready", 2)
    assert server.get("/health").status_code == 200
    async with client_session() as session:
        assert (await whole(session, server.url, max_tokens=3))["status"] == 200


async def test_a_rank_stopped_with_work_is_noticed_by_its_progress_killed_and_replaced(
    serve: Serve, slow_simulated: list[str], poll: Poll
) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--stall-timeout", "2")
    async with client_session() as session:
        streams = await start_streams(session, server.url, 4, max_tokens=400)
        os.kill(server.rank(0)["pid"], signal.SIGSTOP)
        await asyncio.to_thread(poll, lambda: is_ready_in_epoch(server, 0, 2), "rank 0 has its next life")
        server.set_step_ms(FAST_MS)
        ends = await asyncio.wait_for(asyncio.gather(*streams), ANSWER_TIMEOUT_S)
    assert all(end["done"] and end["reason"] == "length" for end in ends)
    assert "no step" in server.rank(0)["death_cause"]
    assert "stall" in {event["kind"] for event in server.status()["events"]}


async def test_a_killed_rank_comes_back_with_the_next_epoch(serve: Serve, simulated: list[str], poll: Poll) -> None:
    server = serve(*simulated, "-dp", "2", "--engine-restarts", "3")
    os.kill(server.rank(1)["pid"], signal.SIGKILL)
    await asyncio.to_thread(poll, lambda: is_ready_in_epoch(server, 1, 2), "rank 1 is ready again")
    assert server.rank(1)["restarts"] == 1
    async with client_session() as session:
        with server.frozen():
            asking = [asyncio.create_task(whole(session, server.url, max_tokens=3)) for _ in range(8)]
            await asyncio.to_thread(poll, lambda: server.num_in_flight() == 8, "all are in flight")
        answers = await asyncio.gather(*asking)
    assert {a["rank"] for a in answers} == {"0", "1"}


async def test_sigterm_lets_streams_finish_refuses_new_requests_and_exits_0(
    serve: Serve, slow_simulated: list[str], poll: Poll
) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--shutdown-timeout", "600")
    async with client_session() as session:
        streams = await start_streams(session, server.url, 20, max_tokens=400)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(poll, lambda: server.get("/ready").status_code == 503, "/ready says 503")
        refused = await whole(session, server.url, max_tokens=3)
        server.set_step_ms(FAST_MS)
        ends = await asyncio.gather(*streams)
    assert refused["status"] == 503
    assert all(end["reason"] == "length" and end["done"] for end in ends)
    assert await asyncio.to_thread(server.process.wait, ANSWER_TIMEOUT_S) == 0

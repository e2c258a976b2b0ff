"""A whole endpoint over tcp with CURVE, on one node: as it is where ranks are on other nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from cores.codec import decode, encode
from cores.control_messages import EngineAlive, Shutdown
from cores.messages import RankId

Serve = Callable[..., Any]
Poll = Callable[..., Any]

NUM_STREAMS = 8
NUM_TOKENS = 300


@pytest.fixture
def over_tcp(simulated: list[str]) -> list[str]:
    return [*simulated, "-dp", "2", "--data-parallel-transport", "tcp"]


def client_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))


async def text_of(session: aiohttp.ClientSession, url: str, seed: int, on_token: Callable[[], None] = lambda: None) -> str:
    body = {
        "model": "tiny", "prompt": f"stream {seed}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "seed": seed,
    }  # fmt: skip
    text = ""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                text += json.loads(data)["choices"][0]["text"]
                on_token()
    return text


def listening(server: Any) -> set[tuple[str, int]]:
    """Addresses that its processes listen on, but for HTTP."""
    found = {
        connection.laddr
        for process in [*server.descendants(), psutil.Process(server.process.pid)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    http_port = int(server.url.rpartition(":")[2])
    return {(address.ip, address.port) for address in found if address.port != http_port}


async def test_a_killed_rank_and_a_killed_front_end_cost_no_answer_a_token(
    serve: Serve, over_tcp: list[str], poll: Poll
) -> None:
    server = serve(*over_tcp)
    async with client_session() as session:
        undisturbed = await asyncio.gather(*(text_of(session, server.url, i) for i in range(NUM_STREAMS)))
        under_way = asyncio.Event()
        streams = [asyncio.create_task(text_of(session, server.url, i, under_way.set)) for i in range(NUM_STREAMS)]
        await under_way.wait()
        os.kill(server.rank(1)["pid"], signal.SIGKILL)
        assert await asyncio.gather(*streams) == undisturbed
    await asyncio.to_thread(
        poll, lambda: (server.rank(1)["epoch"], server.rank(1)["state"]) == (2, "ready"), "its next life", 60
    )
    os.kill(server.status()["front_ends"][0]["pid"], signal.SIGKILL)
    async with client_session() as session:
        assert await text_of(session, server.url, 3) == undisturbed[3]


def test_who_has_no_key_is_heard_nowhere(serve: Serve, over_tcp: list[str]) -> None:
    server = serve(*over_tcp)
    addresses = listening(server)
    assert len(addresses) == 3  # the launcher's, and a front end's two
    assert [is_let_in(ip, port) for ip, port in addresses] == [False, False, False]
    assert [row["state"] for row in server.status()["ranks"]] == ["ready", "ready"]


def is_let_in(ip: str, port: int) -> bool:
    """Somebody without a key, under the name of a rank."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, stranger.get_monitor_socket() as events:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IDENTITY, RankId(0, 1).identity)
        stranger.connect(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
        while events.poll(60_000):
            event = recv_monitor_message(events)["event"]
            if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED):
                stranger.disable_monitor()
                return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
    raise AssertionError("neither let in nor turned away")


def test_a_life_that_was_declared_dead_is_told_to_end_when_it_speaks(serve: Serve, simulated: list[str]) -> None:
    """As a rank is whose node was cut off for a while. It knows the key; only its epoch gives it away."""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        server = serve(*simulated, env={"TMPDIR": directory})
        (control,) = Path(directory).glob("gateway-*/control")
        old, now = RankId(0, 0), RankId(0, server.rank(0)["epoch"])
        with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
            rank.setsockopt(zmq.LINGER, 0)
            rank.setsockopt(zmq.IDENTITY, old.identity)
            rank.connect(f"ipc://{control}")
            rank.send(encode(EngineAlive(now)))  # in another's name: dropped
            rank.send(encode(EngineAlive(old)))
            assert rank.poll(60_000)
            assert decode(rank.recv()) == Shutdown(0.0)
        assert server.rank(0)["state"] == "ready"
        server.stop()

"""`gateway serve` in a Ray cluster of three nodes, of which one at a time is lost. Real raylets, in network namespaces."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from cores.runner.testing import make_tiny_llama
from scripts.netns_cluster import NetnsCluster, why_not
from tests.e2e.conftest import Server
from tests.system.cluster_server import ClusterServer, Stream, begun, bodies, status, texts

pytestmark = pytest.mark.system

NUM_STREAMS = 30
NUM_TOKENS = 400
ENDLESS = 900_000  # tokens: whatever has so many to make is there when its rank dies


@pytest.fixture
def cluster() -> Iterator[NetnsCluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with NetnsCluster() as cluster:
        yield cluster


@pytest.fixture
def start(cluster: NetnsCluster, tmp_path: Path) -> Iterator[Callable[..., ClusterServer]]:
    servers: list[ClusterServer] = []

    def start(*words: str) -> ClusterServer:
        servers.append(ClusterServer(cluster, tmp_path, *words))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
async def undisturbed(serve: Callable[..., Server], tiny_model: str) -> list[str]:
    """What the streams are to say: the simulated engine's tokens depend on the request alone."""
    server = serve(tiny_model, "--engine", "simulated", "--data-parallel-backend", "mp", "--simulated", "step_ms=0")
    async with aiohttp.ClientSession(server.url) as session:
        return await texts(session, bodies(NUM_STREAMS, NUM_TOKENS))


def endless(session: aiohttp.ClientSession, rank: int) -> Stream:
    (body,) = bodies(1, ENDLESS)
    return Stream(session, body, rank)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def noticed_s(session: aiohttp.ClientSession, rank: int, since_s: float) -> float:
    """How long after that moment the rank's death was declared."""
    row = (await status(session))["ranks"][rank]
    return time.monotonic() - row["last_death_s_ago"] - since_s


async def test_a_node_that_is_cut_off_costs_no_stream_a_token_and_its_rank_lives_on_elsewhere(
    cluster: NetnsCluster, start: Callable[..., ClusterServer], tiny_model: str, undisturbed: list[str]
) -> None:
    cluster.add_worker("worker-1")
    cluster.add_worker("worker-2")
    server = start(tiny_model, "--engine", "simulated", "--simulated", "step_ms=10", "-dp", "2", "--max-model-len", "1000000")
    await server.until_ready()
    async with server.session() as session:
        rows = (await status(session))["ranks"]
        assert {row["node"] for row in rows} == {"worker-1", "worker-2"}
        lost = rows[0]
        ballast = endless(session, lost["rank"])
        streams = [Stream(session, body) for body in bodies(NUM_STREAMS, NUM_TOKENS)]
        await begun([ballast, *streams])
        cut_s = time.monotonic()
        cluster.cut(lost["node"])
        assert await asyncio.gather(*(stream.reading for stream in streams)) == undisturbed

        row = await server.until_rank(session, lost["rank"], epoch=2, state="ready")
        assert row["node"] != lost["node"]
        assert f"node {lost['node']} is gone" in row["death_cause"]
        assert row["requests_moved_away"] >= 1
        pause_s = max(stream.longest_pause_s for stream in streams)
        print(f"death noticed after {await noticed_s(session, lost['rank'], cut_s):.2f} s; longest pause {pause_s:.2f} s")

        # The old life is still there, and counts no more: when it is heard again it is told to end.
        assert is_alive(lost["pid"])
        cluster.mend(lost["node"])
        await server.until(lambda: not is_alive(lost["pid"]), "the end of the rank that was cut off")
        assert [row["state"] for row in (await status(session))["ranks"]] == ["ready", "ready"]
        ballast.reading.cancel()


async def test_requests_wait_when_the_last_worker_is_killed_and_a_node_that_is_added_gets_the_ranks(
    cluster: NetnsCluster, start: Callable[..., ClusterServer], tiny_model: str, undisturbed: list[str]
) -> None:
    cluster.add_worker("worker-1")
    server = start(tiny_model, "--engine", "simulated", "--simulated", "step_ms=10", "-dp", "2", "--max-model-len", "1000000")
    await server.until_ready()
    async with server.session() as session:
        ballast = [endless(session, rank) for rank in (0, 1)]
        streams = [Stream(session, body) for body in bodies(NUM_STREAMS, NUM_TOKENS)]
        await begun([*ballast, *streams])
        killed_s = time.monotonic()
        cluster.kill("worker-1")
        await server.until(
            lambda: "waits for a node that has room" in server.log(), "the launcher's word that there is no room"
        )
        print(f"death noticed after {await noticed_s(session, 0, killed_s):.2f} s")
        cluster.add_worker("worker-2")
        assert await asyncio.gather(*(stream.reading for stream in streams)) == undisturbed
        for rank in (0, 1):
            assert (await server.until_rank(session, rank, epoch=2, state="ready"))["node"] == "worker-2"
        for stream in ballast:
            stream.reading.cancel()


async def test_torch_ranks_on_two_nodes_answer_as_before_when_one_node_is_killed(
    cluster: NetnsCluster, start: Callable[..., ClusterServer], tmp_path: Path
) -> None:
    model = str(make_tiny_llama(tmp_path / "tiny", max_model_len=8192))
    cluster.add_worker("worker-1")
    cluster.add_worker("worker-2")
    server = start(model, "--dtype", "float32", "--device", "cpu", "-dp", "2", "--num-kv-blocks", "2048")
    await server.until_ready()
    async with server.session() as session:
        wanted = bodies(6, 200)
        undisturbed = await texts(session, wanted)
        (body,) = bodies(1, 7000)
        lost: dict[str, Any] = (await status(session))["ranks"][1]
        ballast = Stream(session, body, 1)
        streams = [Stream(session, body) for body in wanted]
        await begun([ballast, *streams])
        cluster.kill(lost["node"])
        assert await asyncio.gather(*(stream.reading for stream in streams)) == undisturbed
        row = await server.until_rank(session, 1, epoch=2, state="ready")
        assert row["requests_moved_away"] >= 1
        assert row["node"] != lost["node"]
        ballast.reading.cancel()


async def test_a_cluster_without_room_ends_the_start_with_a_table(
    cluster: NetnsCluster, start: Callable[..., ClusterServer], tiny_model: str
) -> None:
    server = start(tiny_model, "--engine", "simulated", "-dp", "2", "--engine-ready-timeout", "3")
    await server.until(lambda: server.process.poll() is not None, "the end of the start")
    assert server.process.returncode == 1
    last = server.log().splitlines()
    table = [line.split() for line in last if line.strip().startswith("head ")]
    assert ["head", "10.99.0.1", "0", "0", "of", "0", "0"] in table
    assert any(re.search(r"did not start: no node has had room for rank [01] for 3 s$", line) for line in last), server.log()
    assert "asked: a node with CPUs; there:" in last

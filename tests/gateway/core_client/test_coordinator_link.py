"""An endpoint's line to the coordinator, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
import zmq

from cores.codec import decode, encode
from cores.messages import GroupLoads, MemberLeft, MemberReport, RankId, RankLoad
from gateway.core_client.coordinator_link import CoordinatorLink

DEADLINE_S = 60.0
RANKS = ((RankId(1, 1), "ready", RankLoad(num_waiting=3)),)

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def router(context: Context) -> Iterator[zmq.Socket[bytes]]:
    """The coordinator's, not bound yet."""
    with context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        yield router


@pytest.fixture
def link(context: Context, loads: asyncio.Queue[GroupLoads]) -> Iterator[CoordinatorLink]:
    link = CoordinatorLink(context, loads.put_nowait)
    yield link
    link.close()


@pytest.fixture
def loads() -> asyncio.Queue[GroupLoads]:
    return asyncio.Queue()


async def until_reported(link: CoordinatorLink) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not link.report("http://here", RANKS):
            await asyncio.sleep(0.005)


async def test_reports_go_out_loads_come_in_and_a_member_that_leaves_says_so(
    router: zmq.Socket[bytes], link: CoordinatorLink, loads: asyncio.Queue[GroupLoads]
) -> None:
    router.bind("tcp://127.0.0.1:0")
    link.start(router.getsockopt_string(zmq.LAST_ENDPOINT))
    await until_reported(link)
    identity, frame = await asyncio.to_thread(router.recv_multipart)
    report = decode(frame)
    assert isinstance(report, MemberReport)
    assert (report.url, report.ranks) == ("http://here", RANKS)

    group = GroupLoads(1, ((RankId(1, 1), "ready", RankLoad(), "http://here", 0.5),))
    router.send_multipart([identity, b"\xc1 nonsense"])
    router.send_multipart([identity, encode(group)])
    async with asyncio.timeout(DEADLINE_S):
        assert await loads.get() == group

    link.close()
    link.close()
    _, frame = await asyncio.to_thread(router.recv_multipart)
    assert decode(frame) == MemberLeft(report.member)


async def test_without_a_coordinator_nothing_is_kept_and_the_first_one_hears_only_the_news(
    router: zmq.Socket[bytes], link: CoordinatorLink
) -> None:
    with socket.socket() as nobody:  # has the port and does not listen
        nobody.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        link.start(address)
        assert not any(link.report("http://old", RANKS) for _ in range(100))
    router.bind(address)
    await until_reported(link)
    _, frame = await asyncio.to_thread(router.recv_multipart)
    report = decode(frame)
    assert isinstance(report, MemberReport)
    assert report.url == "http://here"

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from cores.codec import Message, decode, encode
from cores.control_messages import EngineStarting, FrontEndFailed, FrontEndHello, RankDied, Shutdown, front_end_identity
from cores.messages import EngineCoreDead, RankId
from gateway.launch.control import ControlSocket

DEADLINE_S = 60.0


class Place:
    """A control socket and peers that talk to it."""

    def __init__(self, address: str) -> None:
        self.received: list[tuple[bytes, Message]] = []
        self.news = asyncio.Event()
        self.control = ControlSocket(self._on_message)
        self.control.start(address)
        self._context = zmq.asyncio.Context()
        self._peers: list[zmq.asyncio.Socket] = []

    def _on_message(self, identity: bytes, message: Message) -> None:
        self.received.append((identity, message))
        self.news.set()

    def peer(self, identity: bytes) -> zmq.asyncio.Socket:
        peer = self._context.socket(zmq.DEALER)
        self._peers.append(peer)
        peer.setsockopt(zmq.IDENTITY, identity)
        peer.connect(self.control.address)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.close(linger=0)
        self._context.term()
        self.control.close()

    async def until(self, num_messages: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.received) < num_messages:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        place = Place(f"ipc://{directory}/control")
        yield place
        place.close()


async def test_messages_arrive_with_the_name_of_their_sender_and_answers_go_back(place: Place) -> None:
    peer = place.peer(RankId(3, 2).identity)
    starting = EngineStarting(RankId(3, 2), 1, "loading")
    await peer.send(encode(starting))
    await place.until(1)
    assert place.received == [(b"rank-3-2", starting)]
    assert place.control.send(b"rank-3-2", Shutdown(1.5))
    async with asyncio.timeout(DEADLINE_S):
        assert decode(await peer.recv()) == Shutdown(1.5)


async def test_sending_to_somebody_who_is_not_there_says_so_at_once(place: Place) -> None:
    assert not place.control.send(front_end_identity(0), Shutdown(0.0))


async def test_malformed_frames_are_counted_and_the_rest_is_read(place: Place) -> None:
    peer = place.peer(b"front-end-0")
    await peer.send(b"not ours")
    await peer.send_multipart([b"two", b"frames"])
    await peer.send(encode(RankDied(RankId(0, 1), "cause")))
    await place.until(1)
    assert place.control.num_malformed == 2


async def test_burst_is_read_whole_although_answers_are_sent_between(place: Place) -> None:
    peer = place.peer(b"front-end-0")
    for i in range(200):
        await peer.send(encode(RankDied(RankId(0, i), "cause")))
        place.control.send(b"front-end-0", Shutdown(0.0))
    await place.until(200)
    assert [message.rank_id.epoch for _, message in place.received] == list(range(200))  # type: ignore[union-attr]


async def test_restarted_peer_takes_over_the_name_of_the_dead_one(place: Place) -> None:
    old = place.peer(b"front-end-0")
    await old.send(encode(RankDied(RankId(0, 1), "old")))
    await place.until(1)
    new = place.peer(b"front-end-0")
    await new.send(encode(RankDied(RankId(0, 1), "new")))
    await place.until(2)
    assert place.control.send(b"front-end-0", Shutdown(2.0))
    async with asyncio.timeout(DEADLINE_S):
        assert decode(await new.recv()) == Shutdown(2.0)


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (b"anybody", EngineCoreDead(RankId(0, 1), "made up")),
        (b"rank-1-1", EngineCoreDead(RankId(0, 1), "made up")),
        (b"rank-0-1", EngineCoreDead(RankId(0, 2), "made up")),
        (b"rank-0-1", RankDied(RankId(0, 1), "made up")),
        (b"anybody", FrontEndFailed(0, "made up")),
        (b"front-end-1", FrontEndHello(0, 1, "ipc://in", "ipc://out")),
    ],
)
async def test_nobody_speaks_for_another(place: Place, sender: bytes, message: Message) -> None:
    await place.peer(sender).send(encode(message))
    honest = place.peer(b"front-end-0")
    await honest.send(encode(FrontEndFailed(0, "true")))
    await place.until(1)
    async with asyncio.timeout(DEADLINE_S):
        while not place.control.num_malformed:
            await asyncio.sleep(0.005)
    assert place.received == [(b"front-end-0", FrontEndFailed(0, "true"))]


async def test_flood_of_malformed_messages_is_counted_and_does_not_fill_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    peer = place.peer(b"front-end-0")
    for _ in range(1000):
        await peer.send(b"garbage")
    await peer.send(encode(RankDied(RankId(0, 1), "cause")))
    await place.until(1)
    assert place.control.num_malformed == 1000
    assert len([r for r in caplog.records if "malformed" in r.getMessage()]) == 10

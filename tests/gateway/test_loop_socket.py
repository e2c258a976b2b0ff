"""The loop's ZMQ sockets, over real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from gateway.loop_socket import MAX_FRAMES_PER_TURN, LoopSocket

DEADLINE_S = 60.0


Context = zmq.Context[zmq.Socket[bytes]]
Peer = Callable[[int, str], zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def peer(context: Context) -> Iterator[Peer]:
    """Connects ordinary sockets and closes them."""
    with ExitStack() as stack:

        def connect(kind: int, address: str) -> zmq.Socket[bytes]:
            socket = stack.enter_context(context.socket(kind))
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.setsockopt(zmq.IDENTITY, b"peer")
            socket.connect(address)
            return socket

        yield connect


class Inbox:
    """What a `LoopSocket` handed over."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self._changed = asyncio.Event()

    def __call__(self, frames: list[bytes]) -> None:
        self.messages.append(frames)
        self._changed.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()


async def test_messages_that_came_before_the_reader_started_are_read(context: Context, peer: Peer, tmp_path: Path) -> None:
    inbox = Inbox()
    pull = LoopSocket(context, zmq.PULL, inbox)
    address = pull.bind(f"ipc://{tmp_path}/p")
    push = peer(zmq.PUSH, address)
    push.send(b"early")
    pull.start()
    await inbox.wait_for(1)
    pull.close()
    assert inbox.messages == [[b"early"]]


async def test_a_flood_is_read_completely_and_the_loop_gets_turns_in_between(
    context: Context, peer: Peer, tmp_path: Path
) -> None:
    inbox = Inbox()
    pull = LoopSocket(context, zmq.PULL, inbox)
    address = pull.bind(f"ipc://{tmp_path}/p")
    push = peer(zmq.PUSH, address)
    total = 20 * MAX_FRAMES_PER_TURN
    for i in range(total):
        push.send(str(i).encode())
    pull.start()
    largest_gap, seen = 0, 0
    async with asyncio.timeout(DEADLINE_S):
        while seen < total:
            await asyncio.sleep(0)
            largest_gap, seen = max(largest_gap, len(inbox.messages) - seen), len(inbox.messages)
    pull.close()
    assert inbox.messages == [[str(i).encode()] for i in range(total)]
    assert largest_gap <= 2 * MAX_FRAMES_PER_TURN


async def test_replies_are_read_although_sends_swallow_the_edge_that_announced_them(
    context: Context, peer: Peer, tmp_path: Path
) -> None:
    inbox = Inbox()
    router = LoopSocket(context, zmq.ROUTER, inbox)
    address = router.bind(f"ipc://{tmp_path}/r")
    dealer = peer(zmq.DEALER, address)
    router.start()
    dealer.send(b"hello")
    await inbox.wait_for(1)
    for i in range(200):
        router.send([b"peer", b"command"])
        await asyncio.to_thread(dealer.recv)
        dealer.send(b"reply")
        router.send([b"peer", b"another"])  # at once: this one may meet the reply half-way
        await asyncio.to_thread(dealer.recv)
        await inbox.wait_for(i + 2)
    router.close()


async def test_a_send_to_a_peer_that_is_not_there_raises(context: Context, tmp_path: Path) -> None:
    router = LoopSocket(context, zmq.ROUTER, Inbox())
    router.bind(f"ipc://{tmp_path}/r")
    router.start()
    with pytest.raises(zmq.ZMQError):
        router.send([b"nobody", b"command"])
    router.close()


async def test_closing_from_within_a_message_ends_the_reading(context: Context, peer: Peer, tmp_path: Path) -> None:
    seen: list[list[bytes]] = []

    def close_at_once(frames: list[bytes]) -> None:
        seen.append(frames)
        pull.close()

    pull = LoopSocket(context, zmq.PULL, close_at_once)
    address = pull.bind(f"ipc://{tmp_path}/p")
    push = peer(zmq.PUSH, address)
    push.send(b"1")
    push.send(b"2")
    pull.start()
    async with asyncio.timeout(DEADLINE_S):
        while not seen:
            await asyncio.sleep(0)
    pull.close()
    assert seen == [[b"1"]]


async def test_a_message_that_its_reader_cannot_handle_does_not_hold_up_the_next(
    context: Context, peer: Peer, tmp_path: Path
) -> None:
    inbox = Inbox()

    def handle(frames: list[bytes]) -> None:
        if frames == [b"bad"]:
            raise ValueError("a bug of ours")
        inbox(frames)

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what["exception"]))
    pull = LoopSocket(context, zmq.PULL, handle)
    address = pull.bind(f"ipc://{tmp_path}/p")
    push = peer(zmq.PUSH, address)
    for frame in (b"bad", b"bad", b"good"):
        push.send(frame)
    assert push.poll(1000 * DEADLINE_S, zmq.POLLOUT)
    pull.start()
    await inbox.wait_for(1)
    pull.close()
    assert inbox.messages == [[b"good"]]
    assert [str(error) for error in errors] == ["a bug of ours"] * 2

"""Synchronous ZMQ sockets on an asyncio loop. Knows frames, not what is in them.

Theory of operation
-------------------
`zmq.asyncio` costs 12 µs a message in a flood; a plain socket read from its file descriptor costs 0.55 µs. The price is one
rule: the descriptor is **edge-triggered**. It becomes readable when the socket's state may have changed, once. So a reader must

1. drain until EAGAIN (or come back by itself when it stops early to give the loop a turn), and
2. look at the socket's EVENTS after every *send* too: a send processes the same internal commands, and may swallow the edge
   that announced a message to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from cores.codec import MAX_FRAME_BYTES
from cores.curve import GroupKey

MAX_FRAMES_PER_TURN = 64  # then the loop gets a turn: a flood must not starve HTTP
LOSSY_HIGH_WATER_MARK = 4


class LoopSocket:
    """A ZMQ socket whose incoming messages are handed to `on_message(frames)` on the running loop.

    A lossy one keeps nothing for a peer that is not there or does not read: `send` raises `zmq.Again`. A ROUTER with
    `hands_over` gives a name to whoever claims it last: a process that starts again has the name of its dead predecessor.
    Bound or connected with a `key`, it speaks only to who has the same.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        on_message: Callable[[list[bytes]], None],
        *,
        is_lossy: bool = False,
        hands_over: bool = False,
        linger_ms: int = 0,
    ) -> None:
        self._socket = context.socket(kind)
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled: asyncio.Handle | None = None
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        # Not lossy: a full queue must not block or drop. Bytes are bounded by what is in flight.
        self._socket.setsockopt(zmq.SNDHWM, LOSSY_HIGH_WATER_MARK if is_lossy else 0)
        self._socket.setsockopt(zmq.IMMEDIATE, is_lossy)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that is gone raises instead of vanishing
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, hands_over)

    def bind(self, address: str, key: GroupKey | None = None) -> str:
        """Binds, and returns the address as bound."""
        if key is not None:
            key.secure_server(self._socket)
        self._socket.bind(address)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str, identity: bytes | None = None, key: GroupKey | None = None) -> None:
        if key is not None:
            key.secure_client(self._socket)
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)

    def start(self) -> None:
        """Begins to read. Needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._drain)
        self._schedule_drain()  # what came before the reader was there raised no edge for it

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def send(self, frames: list[bytes]) -> None:
        """Without blocking. Raises `zmq.ZMQError`: EHOSTUNREACH when a ROUTER's peer is gone."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self.poke()  # a send that fails may have swallowed the edge, too

    def poke(self) -> None:
        """Reads soon if there is something to read: the edge may have been swallowed (see above)."""
        if self._loop is not None and not self.is_closed and int(self._socket.EVENTS) & zmq.POLLIN:
            self._schedule_drain()

    def drain_now(self) -> None:
        """Reads all that has arrived at once: what a dead peer sent comes before the news of its death."""
        while self._receive_one():
            pass

    def close(self) -> None:
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._socket.close()

    def _schedule_drain(self) -> None:
        if self._scheduled is None and self._loop is not None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        may_have_more = True
        try:
            for _ in range(MAX_FRAMES_PER_TURN):
                if not self._receive_one():
                    may_have_more = False
                    return
        finally:
            if may_have_more:  # also behind a message that its handler could not take: no edge tells of those that wait there
                self._schedule_drain()

    def _receive_one(self) -> bool:
        if self._socket.closed:  # a handler of an earlier message may have closed us
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._on_message(frames)
        return True

"""The launcher's one socket: engine cores and front ends report on it and take orders from it. Knows no state of theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from cores.codec import Message, decode, encode
from cores.control_messages import (
    EngineAlive,
    EngineStarting,
    FrontEndFailed,
    FrontEndHello,
    FrontEndReady,
    RankLog,
    front_end_identity,
    log_identity,
)
from cores.curve import GroupKey, guard
from cores.log import is_worth_a_line
from cores.messages import EngineCoreDead, EngineReady
from gateway.loop_socket import LoopSocket

logger = logging.getLogger(__name__)

LINGER_MS = 200  # an order to end is worth a moment

OnMessage = Callable[[bytes, Message], None]


def check_sender(identity: bytes, message: Message) -> None:
    """Everybody speaks for itself: an engine core of its own life, a front end of itself and of what it sees of ranks.

    Raises `ValueError` for the message of somebody else.
    """
    match message:
        case EngineStarting() | EngineReady() | EngineAlive() | EngineCoreDead():
            is_its_own = identity == message.rank_id.identity
        case RankLog():
            is_its_own = identity == log_identity(message.rank_id)
        case FrontEndHello() | FrontEndReady() | FrontEndFailed():
            is_its_own = identity == front_end_identity(message.index)
        case _:
            is_its_own = identity.startswith(b"front-end-")
    if not is_its_own:
        raise ValueError(f"it cannot say {type(message).__name__} for another")


class ControlSocket:
    """A ROUTER whose peers name themselves. Lives on the running loop, from `start` to `close`."""

    def __init__(self, on_message: OnMessage) -> None:
        self.address = ""  # once it has started
        self.num_malformed = 0
        self._stop_guard: Callable[[], None] = lambda: None
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # A restarted front end has the name of the dead one; what is for it shall not go to the dead one's connection.
        self._socket = LoopSocket(self._context, zmq.ROUTER, self._on_frames, hands_over=True, linger_ms=LINGER_MS)

    def start(self, address: str, key: GroupKey | None = None) -> None:
        """Raises `zmq.ZMQError` when the address cannot be bound."""
        self._stop_guard = guard(self._context, key)
        self.address = self._socket.bind(address, key)
        self._socket.start()

    def _on_frames(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        try:
            (frame,) = rest
            message = decode(frame)
            check_sender(identity, message)
        except ValueError as error:  # not one frame, not one of ours, or not its own
            self.num_malformed += 1
            if is_worth_a_line(self.num_malformed):
                logger.error(
                    "control socket: dropped a malformed message of %r (%d so far): %s", identity, self.num_malformed, error
                )
            return
        self._on_message(identity, message)

    def send(self, identity: bytes, message: Message) -> bool:
        """Never waits. False when that peer is not there."""
        try:
            self._socket.send([identity, encode(message)])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._stop_guard()
        self._context.term()  # at most LINGER_MS

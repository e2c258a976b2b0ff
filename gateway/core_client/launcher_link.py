"""A front end's line to the launcher: the launcher's verdicts come in, proofs and doubts go out."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from cores.codec import CodecError, Message, decode, encode
from cores.control_messages import AbortedElsewhere, AbortElsewhere, GroupOrderDone, GroupState, Shutdown, front_end_identity
from cores.curve import GroupKey
from gateway.loop_socket import LoopSocket

logger = logging.getLogger(__name__)


class LauncherLink:
    """`on_group_state` gets every snapshot, `on_shutdown` the order to drain within so many seconds, `on_abort` what others
    were asked to abort and what they say to our asking, `on_order_done` the answer to an order of ours."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_group_state: Callable[[GroupState], None],
        on_shutdown: Callable[[float], None],
        on_abort: Callable[[AbortElsewhere | AbortedElsewhere], None],
        on_order_done: Callable[[GroupOrderDone], None],
    ) -> None:
        self._socket = LoopSocket(context, zmq.DEALER, self._on_message)
        self._on_group_state = on_group_state
        self._on_shutdown = on_shutdown
        self._on_abort = on_abort
        self._on_order_done = on_order_done

    def start(self, control_address: str, index: int, key: GroupKey | None = None) -> None:
        self._socket.connect(control_address, front_end_identity(index), key)
        self._socket.start()

    def send(self, message: Message) -> None:
        self._socket.send([encode(message)])

    def poke(self) -> None:
        self._socket.poke()

    def close(self) -> None:
        self._socket.close()

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except CodecError as error:
            logger.warning("dropped a frame of the launcher: %s", error)
            return
        if isinstance(message, GroupState):
            self._on_group_state(message)
        elif isinstance(message, Shutdown):
            self._on_shutdown(message.timeout_s)
        elif isinstance(message, AbortElsewhere | AbortedElsewhere):
            self._on_abort(message)
        elif isinstance(message, GroupOrderDone):
            self._on_order_done(message)

"""A front end's lines to its ranks: commands go out with their numbers, messages come in. Knows no requests.

Theory of operation
-------------------
A ROUTER takes commands out and the first word of each life, `EngineReady`, in; a PULL brings everything else. A rank is
addressed by the identity of one life, so a command for a dead life cannot reach its successor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from cores import messages as m
from cores.codec import CodecError, Message, decode, encode
from cores.config import Transport
from cores.curve import GroupKey, guard
from cores.gaps import OutputGaps, split_number
from cores.log import is_worth_a_line
from gateway.core_client.rank import RankLife
from gateway.errors import EngineDeadError
from gateway.loop_socket import LoopSocket

logger = logging.getLogger(__name__)


class RankLink:
    """`on_ready` gets first words with the identity that the socket knows their sender by, `on_message` all the rest, and
    `on_lost` a rank of which messages are missing, before the next one. What is no message of ours is counted and dropped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_ready: Callable[[bytes, m.EngineReady], None],
        on_message: Callable[[Message], None],
        on_lost: Callable[[m.RankId, int], None],
    ) -> None:
        self.num_malformed = 0
        self._gaps = OutputGaps()
        self._on_lost = on_lost
        self._context = context
        self._stop_guard: Callable[[], None] = lambda: None
        self._on_ready = on_ready
        self._on_message = on_message
        # A rank that had to connect again has the name of its old connection, which our side may still take for alive.
        self._commands = LoopSocket(context, zmq.ROUTER, self._on_command_frames, hands_over=True)
        self._outputs = LoopSocket(context, zmq.PULL, self._on_output_frames)

    def start(self, directory: str, index: int, transport: Transport) -> tuple[str, str]:
        """Begins to read, and returns the addresses for commands and outputs."""
        key = GroupKey.of(transport)
        self._stop_guard = guard(self._context, key)
        addresses = (
            self._commands.bind(transport.address(directory, f"fe{index}-in"), key),
            self._outputs.bind(transport.address(directory, f"fe{index}-out"), key),
        )
        self._commands.start()
        self._outputs.start()
        return addresses

    def send(self, life: RankLife, command: Callable[[int], m.Command]) -> int:
        """Sends one command and returns its number, which counts only if the send succeeds. Raises `EngineDeadError`."""
        seq = life.last_seq + 1
        frame = encode(command(seq))
        try:
            self._commands.send([life.rank_id.identity, frame])
        except zmq.ZMQError as error:
            raise EngineDeadError(f"{life.rank_id} cannot be reached: {error}", life.rank_id.rank, str(error)) from error
        life.last_seq = seq
        return seq

    def read_all(self) -> None:
        """What has arrived by now, before this returns."""
        self._outputs.drain_now()

    def poke(self) -> None:
        """In case ZMQ has swallowed an edge."""
        self._outputs.poke()
        self._commands.poke()

    def close(self) -> None:
        self._commands.close()
        self._outputs.close()
        self._stop_guard()

    def _on_command_frames(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        try:
            message = decode(rest[-1]) if rest else None
        except CodecError as error:
            self._note_malformed(error)
            return
        if isinstance(message, m.EngineReady):
            self._on_ready(identity, message)

    def _on_output_frames(self, frames: list[bytes]) -> None:
        try:
            number, frame = split_number(frames)
            message = decode(frame)
        except CodecError as error:
            self._note_malformed(error)
            return
        rank_id = getattr(message, "rank_id", None)
        if rank_id is not None and (num_lost := self._gaps.num_lost_before(rank_id, number)):
            self._on_lost(rank_id, num_lost)
        self._on_message(message)

    def _note_malformed(self, error: CodecError) -> None:
        self.num_malformed += 1
        if is_worth_a_line(self.num_malformed):
            logger.warning("dropped a malformed frame (%d so far): %s", self.num_malformed, error)

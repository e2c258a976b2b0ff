"""An endpoint's line to the group's coordinator: how our ranks are goes out, how the whole group is comes in.

Nobody waits for the coordinator, and nothing is kept for one that is not there: the next report is whole again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable

import zmq

from cores.codec import CodecError, decode, encode
from cores.curve import GroupKey
from cores.messages import GroupLoads, MemberLeft, MemberReport, RankId, RankLoad
from gateway.loop_socket import LoopSocket

logger = logging.getLogger(__name__)

GOODBYE_LINGER_MS = 100

RankRows = tuple[tuple[RankId, str, RankLoad], ...]


class CoordinatorLink:
    """One member of the group, from `start` to `close`. `on_group_loads` gets every snapshot."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_group_loads: Callable[[GroupLoads], None],
        key: GroupKey | None = None,
        group_size: int = 0,
    ) -> None:
        self._member = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._socket = LoopSocket(context, zmq.DEALER, self._on_message, is_lossy=True, linger_ms=GOODBYE_LINGER_MS)
        self._key = key
        self._group_size = group_size
        self._on_group_loads = on_group_loads

    def start(self, address: str) -> None:
        self._socket.connect(address, self._member.encode(), self._key)
        self._socket.start()

    def report(self, url: str, ranks: RankRows) -> bool:
        """False when it was dropped: the coordinator is not there, or far behind."""
        try:
            self._socket.send([encode(MemberReport(self._member, url, ranks, self._group_size))])
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Says goodbye, if there is anybody: the group need not wait until our reports are old."""
        if self._socket.is_closed:
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send([encode(MemberLeft(self._member))])
        self._socket.close()

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except CodecError as error:
            logger.warning("dropped a frame of the coordinator: %s", error)
            return
        if isinstance(message, GroupLoads):
            self._on_group_loads(message)

"""Whether the head of a Ray cluster still answers: what it knows of the cluster nobody else knows. Knows no actors.

Actors live on without it. Nothing can be started, so a rank that dies then stays dead until the head is back, which it can be
only where somebody has given it a memory of its own ("GCS fault tolerance").
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 1.0
NUM_MISSES = 3  # in a row: a busy machine may leave one or two unanswered


class HeadWatch:
    """Asks again and again, from the start to `close`, and says in the log what has changed."""

    def __init__(self, address: str, *, interval_s: float = PROBE_INTERVAL_S) -> None:
        self.is_gone = False
        self._address = address
        self._interval_s = interval_s
        self._num_misses = 0
        self._asking = asyncio.create_task(self._ask(), name="watch of Ray's head")

    async def _ask(self) -> None:
        while True:
            self._note(await self._answers())
            await asyncio.sleep(self._interval_s)

    async def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), PROBE_TIMEOUT_S)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    def _note(self, answers: bool) -> None:
        self._num_misses = 0 if answers else self._num_misses + 1
        if self.is_gone and answers:
            self.is_gone = False
            logger.info("Ray's head at %s answers again: ranks can be started", self._address)
        elif not self.is_gone and self._num_misses >= NUM_MISSES:
            self.is_gone = True
            logger.critical("Ray's head at %s is gone: what runs goes on, no rank can be started", self._address)

    def close(self) -> None:
        self._asking.cancel()

"""The one task that reads what ranks say, in the order in which it came, and the only one that feeds collectors.

It works in slices and gives the loop a turn after each, so that no batch, however large, delays the others' HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cores.messages import EngineCoreOutputs, UtilityResult
from gateway.admission import Admission
from gateway.core_client import AsyncMPClient
from gateway.core_client.base import EngineDied, EngineFailed, RanksChanged
from gateway.errors import EngineDeadError
from gateway.failover import Failover
from gateway.output_processor import OutputProcessor
from gateway.request_sender import RequestSender

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 1.0


class OutputHandler:
    """From `start` to `stop`; `error` is why it ended before."""

    def __init__(
        self,
        core_client: AsyncMPClient,
        outputs: OutputProcessor,
        sender: RequestSender,
        failover: Failover,
        admission: Admission,
        chunk_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.error: BaseException | None = None
        self._core_client = core_client
        self._outputs = outputs
        self._sender = sender
        self._failover = failover
        self._admission = admission
        self._chunk_size = chunk_size
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="output-handler")
        self._task.add_done_callback(self._on_done)
        self._expiry = asyncio.create_task(self._expire_for_ever(), name="failover-expiry")
        self._expiry.add_done_callback(self._on_done)

    def stop(self) -> None:
        self._stopped = True
        for task in (self._task, self._expiry):
            if task is not None:
                task.cancel()

    @property
    def dead_error(self) -> EngineDeadError:
        """Defined only when there is an `error`."""
        return EngineDeadError(f"the output handler ended: {self.error!r}", cause=repr(self.error))

    async def _run(self) -> None:
        """Alive as long as the server."""
        while True:
            match await self._core_client.get_received():
                case EngineCoreOutputs() as outputs:
                    await self._on_outputs(outputs)
                case UtilityResult() as result:
                    self._core_client.on_utility_result(result)
                case EngineDied() as died:
                    self._on_death(died)
                case RanksChanged():
                    self._failover.resume()
                case EngineFailed(cause):
                    self._failover.forget()
                    self._core_client.forget_queued()
                    self._outputs.fail_all(EngineDeadError(f"the engine is dead: {cause}", cause=cause))

    async def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        for done in self._outputs.process(outputs, self._chunk_size, self._clock()):
            if done.abort_handles:  # stopped on a stop string, which the engine cannot see
                self._sender.leave_ranks(done.abort_handles)
            if done.finished_handles:
                self._core_client.release(done.finished_handles)
            if num_ended := len(done.finished_handles) + len(done.abort_handles):
                self._admission.drain_rate.on_ended(num_ended, self._clock())
            # Between slices and between batches: queued batches must not keep the loop from HTTP.
            await asyncio.sleep(0)

    def _on_death(self, died: EngineDied) -> None:
        num_moved, held = self._failover.num_moved, self._core_client.on_engine_died(died)
        lost = self._failover.on_death(held, is_blameless=died.is_blameless)
        num_waiting = sum(sent.request.handle in self._failover.waiting_handles for sent in held)
        self._core_client.ranks.note_moved(died, self._failover.num_moved - num_moved, len(lost), num_waiting)
        for handle, reason in lost.items():
            text = f"{died.rank_id} died: {died.cause}" + (f"; {reason}" if reason else "")
            siblings = self._outputs.fail([handle], EngineDeadError(text, died.rank_id.rank, died.cause))
            self._sender.leave_ranks(siblings)  # of n > 1, on ranks that live on
        self._failover.resume()  # what could not reach that rank any more

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self._failover.expire()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if self._stopped:
            return
        if task.cancelled():  # by a program that cancels all tasks of its loop, or whose loop ends: it gets errors, not silence
            self.error = asyncio.CancelledError("not by shutdown()")
            logger.warning("the output handler was cancelled, and not by shutdown(): no request can be answered any more")
        else:
            self.error = task.exception()
            logger.critical("the output handler ended", exc_info=self.error)
        self._sender.leave_ranks(self._outputs.fail_all(self.dead_error))

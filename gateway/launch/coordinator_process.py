"""Keeps the group's coordinator running beside rank 0. It only informs: whatever happens to it, serving goes on."""

from __future__ import annotations

import asyncio
import logging

from cores.launch.child_process import ChildProcess
from gateway.config import ParallelConfig

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STOP_TIMEOUT_S = 2.0


class CoordinatorProcess:
    def __init__(self, config: ParallelConfig) -> None:
        self._report_address = f"tcp://{config.data_parallel_address}:{config.data_parallel_rpc_port}"
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="coordinator")

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._child = await ChildProcess.start(
                "coordinator", "balancer.coordinator", {"report_address": self._report_address}
            )
            logger.info("coordinator started on %s, pid %d", self._report_address, self._child.pid)
            await self._child.wait()
            cause = self._child.describe_exit() or "it ended without being asked to"
            logger.error("the coordinator died, its next life begins in %g s: %s", backoff_s, cause)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._child is not None:
            self._child.close_stdin()
            await self._child.end(STOP_TIMEOUT_S)


class NoCoordinator:
    """Of an endpoint that is the whole group, or that has none beside it."""

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def make_coordinator(config: ParallelConfig) -> CoordinatorProcess | NoCoordinator:
    return CoordinatorProcess(config) if config.is_external and config.data_parallel_rank == 0 else NoCoordinator()

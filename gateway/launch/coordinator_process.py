"""Keeps the group's coordinator running beside rank 0. It only informs: whatever happens to it, serving goes on."""

from __future__ import annotations

import asyncio
import logging
import time

from cores.launch.child_process import ChildProcess
from gateway.config import GatewayConfig

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0  # after which the next death is the first again
STOP_TIMEOUT_S = 2.0


def next_backoff(backoff_s: float, lived_s: float) -> float:
    """What to wait before its next life, from what was waited before the one that has just ended; 0 before the first."""
    return FIRST_BACKOFF_S if not backoff_s or lived_s >= LONG_LIFE_S else min(2 * backoff_s, MAX_BACKOFF_S)


class CoordinatorProcess:
    def __init__(self, config: GatewayConfig) -> None:
        parallel = config.parallel
        self._report_address = f"tcp://{parallel.data_parallel_address}:{parallel.data_parallel_rpc_port}"
        self._task_description = {
            "report_address": self._report_address,
            "key_file": parallel.data_parallel_key_file,
            "log_level": config.log_level,
            "log_format": config.log_format,
        }
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="coordinator")
        self._task.add_done_callback(_on_task_done)

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            began_s = time.monotonic()
            cause = await self._live()
            backoff_s = next_backoff(backoff_s, time.monotonic() - began_s)
            logger.error("the coordinator died, its next life begins in %g s: %s", backoff_s, cause)
            await asyncio.sleep(backoff_s)

    async def _live(self) -> str:
        """One life. Returns why it ended."""
        try:
            self._child = await ChildProcess.start("coordinator", "balancer.coordinator", self._task_description)
        except OSError as error:  # no memory, no process or no file left: there may be, later
            return f"it could not be started: {error}"
        logger.info("coordinator started on %s, pid %d", self._report_address, self._child.pid)
        await self._child.wait()
        return self._child.describe_exit() or "it ended without being asked to"

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._child is not None:
            self._child.close_stdin()
            await self._child.end(STOP_TIMEOUT_S)


def _on_task_done(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("the coordinator is not looked after any more; serving goes on", exc_info=error)


class NoCoordinator:
    """Of an endpoint that is the whole group, or that has none beside it."""

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def make_coordinator(config: GatewayConfig) -> CoordinatorProcess | NoCoordinator:
    parallel = config.parallel
    return CoordinatorProcess(config) if parallel.has_others and 0 in parallel.ranks else NoCoordinator()

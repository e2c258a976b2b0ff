"""One endpoint as a member of its group: tells the coordinator how its own ranks are and hears how the others' are.

It only informs. Serving never depends on it, nor on the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from cores.curve import GroupKey
from cores.messages import LOAD_REPORT_INTERVAL_S, GroupLoads
from gateway.config import ParallelConfig
from gateway.core_client.coordinator_link import CoordinatorLink, RankRows

logger = logging.getLogger(__name__)

IDLE_REPORT_INTERVAL_S = 1.0
FIRST_WARNING_S = (
    15.0  # of a coordinator that does not answer; one that does speaks every second. Later ones come after twice that
)


class GroupView:
    """From `start` to `close`. `own_ranks` gives the rows to report, `url` where this endpoint is reached."""

    def __init__(
        self,
        config: ParallelConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        url: str,
        own_ranks: Callable[[], RankRows],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = f"tcp://{config.data_parallel_address}:{config.data_parallel_rpc_port}"
        key_file = config.data_parallel_key_file
        key = None if key_file is None else GroupKey.read(key_file)
        self._link = CoordinatorLink(context, self._on_group_loads, key, config.data_parallel_size)
        self._url = url
        self._own_ranks = own_ranks
        self._clock = clock
        self._reporter: asyncio.Task[None] | None = None
        self._loads: GroupLoads | None = None
        self._loads_at_s = 0.0
        self._heard_at_s = clock()  # or began to listen
        self._warn_after_s = FIRST_WARNING_S

    def start(self) -> None:
        self._link.start(self._address)
        self._reporter = asyncio.create_task(self._report_for_ever(), name="coordinator-reporter")
        self._reporter.add_done_callback(_on_reporter_done)

    def close(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        self._link.close()

    async def _report_for_ever(self) -> None:
        last_ranks, last_s = None, 0.0
        while True:
            ranks = self._own_ranks()
            is_due = ranks != last_ranks or self._clock() - last_s >= IDLE_REPORT_INTERVAL_S
            if is_due and self._link.report(self._url, ranks):
                last_ranks, last_s = ranks, self._clock()
            self._warn_of_silence(self._clock() - self._heard_at_s)
            await asyncio.sleep(LOAD_REPORT_INTERVAL_S)

    def _warn_of_silence(self, silent_s: float) -> None:
        """A wrong address and a wrong key look alike from here: nobody answers."""
        if silent_s < self._warn_after_s:
            return
        self._warn_after_s = 2 * silent_s
        logger.warning(
            "the group's coordinator at %s has not answered for %.0f s: is the endpoint with rank 0 running, with the same "
            "--data-parallel-address, --data-parallel-rpc-port and --data-parallel-key-file? Serving goes on without it",
            self._address, silent_s,
        )  # fmt: skip

    def _on_group_loads(self, loads: GroupLoads) -> None:
        self._loads, self._loads_at_s = loads, self._clock()
        self._heard_at_s = self._loads_at_s
        if self._warn_after_s > FIRST_WARNING_S:
            self._warn_after_s = FIRST_WARNING_S
            logger.info("the group's coordinator at %s answers", self._address)

    def status(self, now: float) -> tuple[dict[str, Any], ...]:
        """A row for each rank of the group that the coordinator knows of, our own included."""
        if self._loads is None:
            return ()
        age_s = now - self._loads_at_s
        return tuple(
            {
                "rank": rank_id.rank, "epoch": rank_id.epoch, "state": state, "url": url, "waiting": load.num_waiting,
                "running": load.num_running, "kv_cache_usage": round(load.kv_cache_usage, 4),
                "queued_tokens": load.num_prefill_tokens, "age_s": round(row_age_s + age_s, 3),
            }
            for rank_id, state, load, url, row_age_s in self._loads.ranks
        )  # fmt: skip


def _on_reporter_done(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("the group hears no more of this endpoint; serving goes on", exc_info=error)

"""External load balancing: this endpoint's own rank only, and the coordinator's view of the rest of the group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cores import messages as m
from gateway.config import GatewayConfig
from gateway.core_client.async_mp import AsyncMPClient
from gateway.core_client.base import FrontEndPlace
from gateway.core_client.coordinator_link import CoordinatorLink

IDLE_REPORT_INTERVAL_S = 1.0


class DPAsyncMPClient(AsyncMPClient):
    """Tells the coordinator how its rank is and hears how the others are. Serving never depends on the coordinator."""

    def __init__(self, config: GatewayConfig, place: FrontEndPlace, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, place, clock)
        self._coordinator = CoordinatorLink(self._context, self._on_group_loads)
        self._reporter: asyncio.Task[None] | None = None
        self._group: m.GroupLoads | None = None
        self._group_at_s = 0.0

    async def start(self) -> None:
        parallel = self._config.parallel
        self._coordinator.start(f"tcp://{parallel.data_parallel_address}:{parallel.data_parallel_rpc_port}")
        self._reporter = asyncio.create_task(self._report_for_ever(), name="coordinator-reporter")
        await super().start()

    async def shutdown(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        self._coordinator.close()
        await super().shutdown()

    async def _report_for_ever(self) -> None:
        last_ranks, last_s = None, 0.0
        while True:
            ranks = tuple((life.rank_id, life.health.state.value, life.load) for life in self.ranks.lives)
            is_due = ranks != last_ranks or self._clock() - last_s >= IDLE_REPORT_INTERVAL_S
            if is_due and self._coordinator.report(self.place.url, ranks):
                last_ranks, last_s = ranks, self._clock()
            await asyncio.sleep(m.LOAD_REPORT_INTERVAL_S)

    def _on_group_loads(self, loads: m.GroupLoads) -> None:
        self._group, self._group_at_s = loads, self._clock()

    def group_status(self, now: float) -> tuple[dict[str, Any], ...]:
        if self._group is None:
            return ()
        age_s = now - self._group_at_s
        return tuple(
            {
                "rank": rank_id.rank, "epoch": rank_id.epoch, "state": state, "url": url, "waiting": load.num_waiting,
                "running": load.num_running, "kv_cache_usage": round(load.kv_cache_usage, 4),
                "queued_tokens": load.num_prefill_tokens, "age_s": round(row_age_s + age_s, 3),
            }
            for rank_id, state, load, url, row_age_s in self._group.ranks
        )  # fmt: skip

"""External load balancing: this endpoint's own rank only, and the coordinator's view of the rest of the group."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import zmq

from cores import messages as m
from cores.codec import encode
from gateway.config import GatewayConfig
from gateway.core_client.async_mp import AsyncMPClient
from gateway.core_client.base import FrontEndPlace
from gateway.core_client.sockets import LoopSocket

IDLE_REPORT_INTERVAL_S = 1.0


class DPAsyncMPClient(AsyncMPClient):
    """Tells the coordinator how its rank is and hears how the others are. Serving never depends on the coordinator."""

    def __init__(self, config: GatewayConfig, place: FrontEndPlace, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, place, clock)
        self._member = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._coordinator = LoopSocket(self._context, zmq.DEALER, self._on_coordinator_message)
        self._reporter: asyncio.Task[None] | None = None
        self._group: m.GroupLoads | None = None
        self._group_at_s = 0.0

    async def start(self) -> None:
        parallel = self._config.parallel
        self._coordinator.connect(
            f"tcp://{parallel.data_parallel_address}:{parallel.data_parallel_rpc_port}", self._member.encode()
        )
        self._coordinator.start()
        self._reporter = asyncio.create_task(self._report_for_ever(), name="coordinator-reporter")
        await super().start()

    async def shutdown(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            self._reporter = None
            self._coordinator.send([encode(m.MemberLeft(self._member))])
            await asyncio.sleep(0)
        self._coordinator.close()
        await super().shutdown()

    async def _report_for_ever(self) -> None:
        last_ranks, last_s = None, 0.0
        while True:
            ranks = tuple((r.life.rank_id, r.life.health.state.value, r.life.load) for r in self._ranks.values())
            if ranks != last_ranks or self._clock() - last_s >= IDLE_REPORT_INTERVAL_S:
                last_ranks, last_s = ranks, self._clock()
                self._coordinator.send([encode(m.MemberReport(self._member, self.place.url, ranks))])
            await asyncio.sleep(m.LOAD_REPORT_INTERVAL_S)

    def _on_coordinator_message(self, frames: list[bytes]) -> None:
        message = self._decode(frames[-1])
        if isinstance(message, m.GroupLoads):
            self._group, self._group_at_s = message, self._clock()

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

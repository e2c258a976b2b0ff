"""Calls to a method of every rank's engine core that have not been answered by all. Knows no sockets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from cores.messages import RankId, UtilityResult
from gateway.errors import EngineDeadError, EngineGenerateError, GatewayError, InvalidRequestError


class UtilityCalls:
    """Call ids are never used twice, so an answer that comes after its caller has gone finds nobody and is dropped."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, RankId], asyncio.Future[Any]] = {}
        self._last_id = 0

    def begin(self, method: str, rank_ids: Sequence[RankId]) -> tuple[int, list[asyncio.Future[Any]]]:
        self._last_id += 1
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rank_ids]
        for rank_id, future in zip(rank_ids, futures, strict=True):
            key = (self._last_id, rank_id)
            self._pending[key] = future
            future.add_done_callback(functools.partial(self._forget, key))
        return self._last_id, futures

    def _forget(self, key: tuple[int, RankId], _: asyncio.Future[Any]) -> None:
        self._pending.pop(key, None)

    def on_result(self, result: UtilityResult) -> None:
        future = self._pending.get((result.call_id, result.rank_id))
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.value)
        else:
            kind = InvalidRequestError if result.is_refusal else EngineGenerateError
            future.set_exception(kind(f"{result.rank_id}: {result.error}"))

    def on_engine_died(self, rank_id: RankId, cause: str) -> None:
        self._fail(
            [f for (_, rank), f in self._pending.items() if rank == rank_id],
            EngineDeadError(f"{rank_id} died: {cause}", rank_id.rank, cause),
        )

    def fail_all(self, error: GatewayError) -> None:
        self._fail(list(self._pending.values()), error)

    def _fail(self, futures: list[asyncio.Future[Any]], error: GatewayError) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(error)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

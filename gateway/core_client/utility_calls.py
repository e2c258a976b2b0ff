"""Calls to a method of every rank's engine core that have not been answered by all. Knows no sockets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cores.messages import RankId, UtilityCall, UtilityResult
from gateway.errors import EngineDeadError, EngineGenerateError, GatewayError, InvalidRequestError


class UtilityCalls:
    """Call ids are never used twice, so an answer that comes after its caller has gone finds nobody and is dropped."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, RankId], asyncio.Future[Any]] = {}
        self._last_id = 0

    def begin(self, rank_ids: Sequence[RankId]) -> tuple[int, list[asyncio.Future[Any]]]:
        self._last_id += 1
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rank_ids]
        for rank_id, future in zip(rank_ids, futures, strict=True):
            key = (self._last_id, rank_id)
            self._pending[key] = future
            future.add_done_callback(functools.partial(self._forget, key))
        return self._last_id, futures

    async def call(
        self,
        send: Callable[[RankId, Callable[[int], UtilityCall]], object],
        rank_ids: Sequence[RankId],
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
    ) -> list[Any]:
        """The results of all. They are all called before the first await, even if one cannot be reached any more: `send` gives
        a call its number and raises `EngineDeadError`."""
        call_id, futures = self.begin(rank_ids)
        try:
            for rank_id, future in zip(rank_ids, futures, strict=True):
                try:
                    send(rank_id, lambda seq: UtilityCall(seq, call_id, method, args))
                except EngineDeadError as error:
                    future.set_exception(error)
            return await asyncio.wait_for(asyncio.gather(*futures), timeout_s)
        except TimeoutError:
            late = ", ".join(str(rank_id) for rank_id, f in zip(rank_ids, futures, strict=True) if f.cancelled())
            raise EngineGenerateError(f"{method} was not done within {timeout_s:g} s on {late}") from None
        finally:
            for future in futures:
                future.cancel()  # of a call that failed or was cancelled: its other answers find nobody

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


def count_survivors(results: Sequence[Any]) -> int:
    """Of calls to one rank each, some of which may have failed. Raises the first failure that was not a rank's death."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, EngineDeadError):
            raise error
    return len(results) - len(errors)


def left_behind(results: Mapping[RankId, Any]) -> dict[RankId, BaseException]:
    """Living ranks that could not do what another has done, and why. Nobody, if none has done it. One that refuses is well,
    and as it was: with requests that cannot end, say."""
    errors = {rank_id: result for rank_id, result in results.items() if isinstance(result, BaseException)}
    if len(errors) == len(results):
        return {}
    return {rank_id: error for rank_id, error in errors.items() if not isinstance(error, EngineDeadError | InvalidRequestError)}

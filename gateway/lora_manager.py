"""Adapters over all ranks of an endpoint: there on every one of them, or not there.

Theory of operation
-------------------
A change takes the store's lock. A new adapter comes in two halves. First every rank loads it without a name; if one cannot, the
others forget theirs and nobody has seen it. Then the store says that it is there, and the ranks are told its name, which only a
death can keep them from. Requests carry an adapter's id beside its name, so each gets the adapter that was meant.

A rank that starts again takes requests once it has what the store says. What it could not load any more is remembered: requests
for that adapter go to other ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

from cores.messages import RankId
from gateway.errors import EngineDeadError, EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.lora_store import Adapters, LoraAdapter, LoraStore
from gateway.models import absolute_path
from gateway.shared_value import locked_unless_stopped, to_its_end
from gateway.status import LoraStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANGE_TIMEOUT_S = 120.0  # for a change over all ranks: a large adapter from a slow disk
UNDO_TIMEOUT_S = 10.0  # ranks that have not answered by then will have done it when they answer again


class Ranks(Protocol):
    """What is asked of a core client."""

    @property
    def serving(self) -> Sequence[RankId]: ...

    async def call_utility_on(
        self, rank_ids: Sequence[RankId], method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]: ...

    def set_missing_loras(self, rank_id: RankId, missing: dict[str, str]) -> None: ...


class LoraManager:
    """Every method that changes something raises `GatewayError`. `taken_names` are those of the model itself."""

    def __init__(
        self,
        ranks: Ranks,
        store: LoraStore,
        taken_names: Sequence[str] = (),
        *,
        is_enabled: bool,
        timeout_s: float = CHANGE_TIMEOUT_S,
    ) -> None:
        self.is_enabled = is_enabled
        self._ranks = ranks
        self._store = store
        self._taken_names = frozenset(taken_names)
        self._timeout_s = timeout_s

    def find(self, name: str) -> LoraAdapter | None:
        return self._adapters().get(name)

    def adapters(self) -> list[LoraAdapter]:
        return list(self._adapters().values())

    def statuses(self, count: Callable[[], Mapping[str, tuple[int, int]]]) -> tuple[LoraStatus, ...]:
        """`count` says how many sequences wait for their first token and have it, by adapter; not asked for without LoRA."""
        if not self.is_enabled:
            return ()
        counts = count()
        names = dict.fromkeys((*self._adapters(), *counts))  # a removed one may still be in use
        return tuple(LoraStatus(name, *counts.get(name, (0, 0))) for name in names)

    def require(self, name: str, param: str) -> LoraAdapter:
        """Raises `InvalidRequestError` (404) when there is none of that name."""
        self._check_enabled(param)
        adapter = self.find(name)
        if adapter is None:
            loaded = ", ".join(map(repr, self._adapters())) or "none"
            message = f"the LoRA adapter {name!r} cannot be found; loaded: {loaded}"
            raise InvalidRequestError(message, param, status=404, code="lora_adapter_not_found")
        return adapter

    def _adapters(self) -> Adapters:
        return (self._store.read() or {}) if self.is_enabled else {}

    # --- changes --------------------------------------------------------------------------------------------------------

    async def add(self, name: str, path: str, *, load_inplace: bool = False) -> LoraAdapter:
        """On every rank or on none. `load_inplace`: also in place of one of that name, which requests under way keep."""
        return await self._run(partial(self._add, name, path, load_inplace), f"adapter {name!r} was not loaded")

    async def _add(self, name: str, path: str, load_inplace: bool) -> LoraAdapter:
        self._check_name(name)
        if name in self._adapters() and not load_inplace:
            raise InvalidRequestError(
                f"the LoRA adapter {name!r} has already been loaded; with load_inplace it would be replaced", "lora_name"
            )
        path = absolute_path(path)
        async with self._undone_if_it_fails():
            lora_id = await self._stage(path)
        # No await from here to the sending: whoever finds the adapter in the store finds it on every rank.
        adapter = LoraAdapter(name=name, path=path, id=lora_id)
        self._store.write({**self._adapters(), name: adapter})
        await self._tell("add_lora", name, path, lora_id)
        logger.info("adapter %r is loaded from %s", name, path)
        return adapter

    async def _stage(self, path: str) -> str:
        """Loads the adapter on every rank, without a name. Its id."""
        rank_ids = self._serving()
        answers = await self._ranks.call_utility_on(rank_ids, "stage_lora", path)
        for rank_id, answer in zip(rank_ids, answers, strict=True):
            if answer["error"] is not None:
                status = 404 if answer["is_missing"] else 400
                raise InvalidRequestError(f"{rank_id}: {answer['error']}", "lora_path", status=status)
        ids = {str(answer["id"]) for answer in answers}
        if len(ids) != 1:
            raise InvalidRequestError(f"the ranks found different files in {path!r}", "lora_path")
        return ids.pop()

    async def remove(self, name: str) -> None:
        """New requests for it are refused from now on; those under way go on."""
        await self._run(partial(self._remove, name), f"not every rank has confirmed that adapter {name!r} is removed")

    async def _remove(self, name: str) -> None:
        self.require(name, "lora_name")
        self._store.write({other.name: other for other in self.adapters() if other.name != name})
        await self._tell("remove_lora", name)
        logger.info("adapter %r is removed", name)

    async def pin(self, name: str) -> None:
        """Keeps it resident on every rank."""
        await self._run(partial(self._pin, name), f"adapter {name!r} was not pinned")

    async def _pin(self, name: str) -> None:
        adapter = self.require(name, "lora_name")
        async with self._undone_if_it_fails():
            await self._ranks.call_utility_on(self._serving(), "pin_lora", name)
        self._store.write({**self._adapters(), name: dataclasses.replace(adapter, is_pinned=True)})

    async def _run(self, change: Callable[[], Awaitable[T]], what_failed: str) -> T:
        """Changes come one by one, and go on to their end even if the caller leaves."""

        async def run() -> T:
            async with self._within_bounds(what_failed, self._store.locked()):
                return await change()

        return await to_its_end(run())

    async def _tell(self, method: str, *args: Any) -> None:
        """What every living rank can do. One that dies of something else meanwhile gets it when it starts again."""
        with contextlib.suppress(EngineDeadError):
            await self._ranks.call_utility_on(self._serving(), method, *args)

    @contextlib.asynccontextmanager
    async def _within_bounds(self, what_failed: str, lock: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        why = "another change of the adapters has not ended"
        try:
            async with asyncio.timeout(self._timeout_s), lock:
                why = "no answer from every rank"
                yield
        except TimeoutError:
            raise EngineGenerateError(f"{what_failed}: {why} within {self._timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def _undone_if_it_fails(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            undo = asyncio.gather(*(self._sync(rank_id) for rank_id in self._ranks.serving), return_exceptions=True)
            await asyncio.wait({undo}, timeout=UNDO_TIMEOUT_S)
            undo.cancel()
            raise

    # --- ranks ----------------------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """At the start of a front end. The first one learns what the ranks have from the start; a later one sees to it that
        they have what the store says, whatever its predecessor had begun."""
        if not self.is_enabled:
            return
        what = "the ranks' adapters"
        async with (
            locked_unless_stopped(self._store, f"{what} are learnt"),
            self._within_bounds(f"{what} are not known", nullcontext()),
        ):
            if self._store.read() is None:
                (loras,) = await self._ranks.call_utility_on(self._serving()[:1], "list_loras")
                self._store.write({lora["name"]: LoraAdapter(**lora) for lora in loras})
            for rank_id in self._serving():
                with contextlib.suppress(EngineDeadError):  # then it is restored when it starts again
                    await self._sync(rank_id)

    async def restore(self, rank_id: RankId, timeout_s: float) -> None:
        """Before a rank that has started again takes requests. It loads them all, one after the other, so a change's bound is
        too short: whoever calls says how long a rank's start may take. Raises `EngineGenerateError`."""
        async with locked_unless_stopped(self._store, f"{rank_id} gets its adapters"):
            await self._sync(rank_id, timeout_s)

    async def _sync(self, rank_id: RankId, timeout_s: float | None = None) -> None:
        wanted = [[adapter.name, adapter.path, adapter.id, adapter.is_pinned] for adapter in self.adapters()]
        (missing,) = await self._ranks.call_utility_on([rank_id], "sync_loras", wanted, timeout_s=timeout_s)
        self._ranks.set_missing_loras(rank_id, missing)
        for name, why in missing.items():
            logger.error("%s lacks adapter %r: %s", rank_id, name, why)

    # --- checks ---------------------------------------------------------------------------------------------------------

    def _serving(self) -> Sequence[RankId]:
        rank_ids = self._ranks.serving
        if not rank_ids:
            raise OverloadedError("no rank is there to take an adapter")
        return rank_ids

    def _check_enabled(self, param: str) -> None:
        if not self.is_enabled:
            raise InvalidRequestError("this server serves no LoRA adapters; start it with --enable-lora", param)

    def _check_name(self, name: str) -> None:
        self._check_enabled("lora_name")
        if not name:
            raise InvalidRequestError("lora_name must not be empty", "lora_name")
        if name in self._taken_names:
            raise InvalidRequestError(f"lora_name: {name!r} is a name of the model itself", "lora_name")

"""What operators order: drain a rank, restart it, another number of ranks. Decides what may be done when; how it is done,
`RankSupervisor` knows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from cores.control_messages import GroupOrder, GroupOrderDone
from cores.words import counted
from gateway.launch.group_ledger import OrderError
from gateway.launch.rank_supervisor import RankSupervisor

logger = logging.getLogger(__name__)


class GroupOperations:
    """One order for a rank at a time, and one that changes their number."""

    def __init__(self, ranks: RankSupervisor) -> None:
        self._ranks = ranks
        self._busy: dict[int, str] = {}  # ranks with an order under way, and what it is
        self._is_scaling = False

    async def carry_out(self, order: GroupOrder) -> GroupOrderDone:
        """Whatever goes wrong is in the answer."""
        what = f"scale to {counted(order.size, 'rank')}" if order.action == "scale" else f"{order.action} rank {order.rank}"
        logger.info("order: %s", what)
        try:
            await self._carry_out(order)
        except OrderError as error:
            logger.warning("order not done: %s: %s", what, error)
            return GroupOrderDone(order.order_id, str(error), error.kind)
        except Exception as error:  # a bug of ours: whoever gave the order would wait for ever
            logger.exception("order not done: %s", what)
            return GroupOrderDone(order.order_id, f"{what}: {type(error).__name__}: {error}", "failed")
        logger.info("order done: %s", what)
        return GroupOrderDone(order.order_id)

    async def _carry_out(self, order: GroupOrder) -> None:
        match order.action:
            case "drain":
                self._ranks.drain(order.rank)
            case "undrain":
                self._ranks.undrain(order.rank)
            case "restart":
                with self._reserved([order.rank], "restarted"):
                    await self._ranks.restart(order.rank, order.drain_timeout_s)
            case "scale":
                await self._scale(order.size, order.drain_timeout_s)
            case _:
                raise OrderError(f"unknown order {order.action!r}")

    async def _scale(self, size: int, drain_timeout_s: float) -> None:
        if self._is_scaling:
            raise OrderError("the number of ranks is being changed already")
        self._is_scaling = True
        try:
            present = self._ranks.ledger.ranks
            if size > len(present):
                await self._add(_free_numbers(present, size - len(present)))
            elif size < len(present):
                await self._remove(self._victims(len(present) - size), drain_timeout_s)
        finally:
            self._is_scaling = False

    async def _add(self, numbers: list[int]) -> None:
        """All or none."""
        with self._reserved(numbers, "added"):
            results = await asyncio.gather(*map(self._ranks.add, numbers), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            if errors:
                added = [number for number, result in zip(numbers, results, strict=True) if result is None]
                await asyncio.gather(*(self._ranks.remove(number, 0.0) for number in added))
                raise errors[0]

    async def _remove(self, numbers: list[int], drain_timeout_s: float) -> None:
        with self._reserved(numbers, "removed"):
            await asyncio.gather(*(self._ranks.remove(number, drain_timeout_s) for number in numbers))

    def _victims(self, num_ranks: int) -> list[int]:
        """Those that serve nobody first, the ones that an operator has drained next, then the highest numbers."""
        ledger = self._ranks.ledger

        def cost(rank: int) -> tuple[int, int]:
            return (0 if ledger.is_down(rank) else 1 if ledger.state(rank) == "draining" else 2, -rank)

        victims = sorted(ledger.ranks, key=cost)[:num_ranks]
        for rank in victims:
            if not ledger.is_down(rank) and ledger.state(rank) not in ("ready", "draining"):
                raise OrderError(f"rank {rank} is {ledger.state(rank)}: it can be removed when it is ready")
        if all(ledger.is_down(rank) for rank in ledger.ranks if rank not in victims):
            raise OrderError("no living rank would be left")
        return victims

    @contextlib.contextmanager
    def _reserved(self, ranks: list[int], what: str) -> Iterator[None]:
        for rank in ranks:
            if rank in self._busy:
                raise OrderError(f"rank {rank} is being {self._busy[rank]}")
        self._busy |= dict.fromkeys(ranks, what)
        try:
            yield
        finally:
            for rank in ranks:
                del self._busy[rank]


def _free_numbers(taken: list[int], count: int) -> list[int]:
    """The lowest ones."""
    return [number for number in range(len(taken) + count) if number not in taken][:count]

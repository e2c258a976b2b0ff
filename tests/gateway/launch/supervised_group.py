"""A rank supervisor over fake ranks, for the tests of whoever gives it orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cores.config import EngineConfig, FrontEndAddress
from cores.control_messages import GroupState
from cores.messages import RankId
from cores.testing import ManualClock
from gateway.launch.group_ledger import GroupLedger
from gateway.launch.rank_plan import RankPlan
from gateway.launch.rank_supervisor import RankSupervisor
from tests.gateway.launch.fake_ranks import FakeRankLauncher, make_ready

FRONT_END = FrontEndAddress(index=0, input_address="ipc://in", output_address="ipc://out")


class LedgerWithBug(GroupLedger):
    bug: Exception | None = None

    def on_process(self, rank_id: RankId, pid: int | None) -> None:
        if self.bug is not None:
            raise self.bug
        super().on_process(rank_id, pid)


class Group:
    """A supervisor over fake ranks; what it says and how long it would have slept is kept."""

    def __init__(self, num_ranks: int, *, max_restarts: int = 3, ready_timeout_s: float = 60.0) -> None:
        self.clock = ManualClock(1000.0)  # it stands still
        self.launcher = FakeRankLauncher()
        self.states: list[GroupState] = []
        self.failures: list[str] = []
        self.sleeps: list[float] = []
        self.may_wake = asyncio.Event()  # from a sleep; set, if the test does not say otherwise
        self.may_wake.set()
        self.ledger = LedgerWithBug(range(num_ranks), max_restarts)
        self.supervisor = RankSupervisor(
            self.ledger, self.launcher, self.states.append, self.failures.append, self._sleep, self.clock
        )
        self.plan = RankPlan(EngineConfig(), "ipc://control", (FRONT_END,), 1, 0, ready_timeout_s)
        self._num_ranks = num_ranks

    async def _sleep(self, delay_s: float) -> None:
        self.sleeps.append(delay_s)
        await self.may_wake.wait()

    def start(self) -> None:
        self.supervisor.start(self.plan, tuple(range(self._num_ranks)))

    def say_ready(self, rank: int, epoch: int = 1) -> None:
        self.supervisor.on_message(make_ready(RankId(rank, epoch)))

    async def bring_up(self) -> None:
        self.start()
        for rank in range(self._num_ranks):
            await self.until(lambda rank=rank: RankId(rank, 1) in self.launcher.lives)  # type: ignore[misc]
            self.say_ready(rank)
        await self.supervisor.up.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets the tasks run until it holds. No time passes: nothing here waits for a clock."""
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        pytest.fail("it does not come true")

    def state(self, rank: int) -> str:
        return self.states[-1].ranks[rank].state

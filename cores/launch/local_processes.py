"""Engine cores as plain child processes of this one (`--data-parallel-backend mp`). Knows no Ray."""

from __future__ import annotations

import os

from cores.config import EngineLaunch, to_plain
from cores.launch.child_process import ChildProcess
from cores.launch.interface import LaunchError, RankExit
from cores.launch.rank_environment import Machine, gpu_variables, memory_variables, thread_variables


class LocalRank:
    """Handle of one life of one rank."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self.pid: int | None = child.pid
        self.node = self.node_id = os.uname().nodename
        self.node_silent_s = 0.0

    @property
    def has_ended(self) -> bool:
        return self._child.returncode is not None

    async def wait(self) -> RankExit:
        code = await self._child.wait()
        return RankExit(self._child.describe_exit(), abrupt=code < 0)

    async def kill(self) -> None:
        await self._child.kill()


class LocalProcessLauncher:
    """`module` is what runs in the child; tests put smaller engines there."""

    def __init__(self, num_local_ranks: int, *, module: str = "cores.engine_core_proc", machine: Machine | None = None) -> None:
        self._num_local_ranks = num_local_ranks
        self._module = module
        self._machine = machine or Machine.here()
        self._ranks: list[LocalRank] = []

    @property
    def host(self) -> str:
        return "127.0.0.1"

    async def open(self) -> None:
        pass

    async def start(self, launch: EngineLaunch) -> LocalRank:
        try:
            child = await ChildProcess.start(
                f"rank {launch.rank}", self._module, to_plain(launch), environment=self._environment(launch)
            )
        except OSError as error:
            raise LaunchError(f"cannot start a process for rank {launch.rank}: {error}") from error
        rank = LocalRank(child)
        self._ranks = [*(r for r in self._ranks if not r.has_ended), rank]
        return rank

    def _environment(self, launch: EngineLaunch) -> dict[str, str]:
        variables = thread_variables(self._machine, self._num_local_ranks, os.environ)
        if launch.config.engine != "simulated":
            variables |= memory_variables(os.environ)
            variables |= gpu_variables(
                self._machine, launch.config.device, launch.local_rank, self._num_local_ranks, os.environ
            )
        return variables

    async def close(self) -> None:
        for rank in self._ranks:
            await rank.kill()
        self._ranks.clear()

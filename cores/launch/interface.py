"""What a launcher of engine cores can do. `local_processes` and `ray_actors` pass one contract suite.

A launcher starts one life of one rank and says when and how it ended. Whether the rank gets another life is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cores.config import EngineLaunch


class LaunchError(RuntimeError):
    """A rank, or what all ranks need, could not be started. One line that says what was asked and what there was."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one life of a rank ended."""

    cause: str  # one line; empty: it ended in order
    abrupt: bool = False  # killed or crashed: no last words of its own can be under way on the control socket
    is_node_lost: bool = False  # it ended because its node did


class RankHandle(Protocol):
    """One life of a rank, from `start` to its end."""

    @property
    def pid(self) -> int | None: ...

    @property
    def node(self) -> str: ...

    @property
    def node_id(self) -> str:
        """Unlike the name, no other node has it."""
        ...

    @property
    def node_silent_s(self) -> float:
        """For how long its node has not answered; 0 on this node."""
        ...

    async def wait(self) -> RankExit:
        """Returns once the process is gone. Any number of tasks may wait; cancelling one of them does the rank no harm."""
        ...

    async def kill(self) -> None:
        """Ends the process without asking. Bounded, idempotent; the process is gone when it returns, or its node is."""
        ...


class RankLauncher(Protocol):
    @property
    def host(self) -> str:
        """The address by which ranks reach this process over tcp, once it is open."""
        ...

    async def open(self) -> None:
        """Whatever is needed once, before the first rank. Raises `LaunchError`, bounded in time."""
        ...

    async def start(self, launch: EngineLaunch) -> RankHandle:
        """Returns when the rank's process exists, long before it is ready. Raises `LaunchError`, bounded in time."""
        ...

    async def close(self) -> None:
        """Kills what still lives and takes down what `open` put up. Bounded, idempotent, also after a failed `open`."""
        ...

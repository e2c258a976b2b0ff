"""Ranks without processes, for whatever starts and ends them."""

from __future__ import annotations

import asyncio

from cores.config import EngineLaunch
from cores.launch.interface import LaunchError, RankExit, RankHandle
from cores.messages import EngineReady, RankId


class FakeRank:
    """A rank that lives until the test ends it."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        self.node = self.node_id = "here"
        self.node_silent_s = 0.0
        self.was_killed = False
        self._end: asyncio.Future[RankExit] = asyncio.get_running_loop().create_future()

    def lose(self, error: Exception) -> None:
        """Whoever waits for its end will not be told."""
        self._end.set_exception(error)

    def end(self, cause: str, *, abrupt: bool = True, is_node_lost: bool = False) -> None:
        if not self._end.done():
            self._end.set_result(RankExit(cause, abrupt, is_node_lost))

    async def wait(self) -> RankExit:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        self.was_killed = True
        self.end("killed")


def make_ready(rank_id: RankId) -> EngineReady:
    """The first word of a life."""
    return EngineReady(
        rank_id=rank_id, pid=1, node="here", device="cpu", max_model_len=1, vocab_size=1, eos_token_ids=(),
        block_size=1, num_kv_blocks=1, max_num_seqs=1, max_num_batched_tokens=1,
    )  # fmt: skip


class FakeRankLauncher:
    def __init__(self) -> None:
        self.launches: list[EngineLaunch] = []
        self.lives: dict[RankId, FakeRank] = {}
        self.refusal: str | None = None
        self.refuse_with: Exception | None = None  # once; what no launcher should raise

    host = "127.0.0.1"

    async def open(self) -> None: ...

    async def start(self, launch: EngineLaunch) -> RankHandle:
        error, self.refuse_with = self.refuse_with, None
        if error is not None:
            raise error
        if self.refusal is not None:
            raise LaunchError(self.refusal)
        self.launches.append(launch)
        rank_id = RankId(launch.rank, launch.epoch)
        self.lives[rank_id] = FakeRank(1000 + len(self.lives))
        return self.lives[rank_id]

    async def close(self) -> None: ...

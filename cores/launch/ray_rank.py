"""One life of one rank as a Ray actor, seen from the launcher: how it ends, and how it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cores.launch.interface import RankExit
from cores.launch.rank_log import LogPipe
from cores.launch.ray_calls import END_TIMEOUT_S, is_in_cluster, kill_actor
from cores.launch.ray_nodes import Node, NodeWatch, answers
from cores.launch.ray_summary import summary

GONE_TIMEOUT_S = 5.0
LOST_NODE_S = 2.0  # without an answer: what it is asked to do, it will not say that it has done


class RayRank:
    """Handle of one life of one rank. Another node has a `watch`; over tcp there is no `log` here."""

    def __init__(
        self,
        actor: Any,
        life: Any,
        pid: int,
        node: Node,
        watch: NodeWatch | None,
        log: LogPipe | None,
        on_end: Callable[[], None],
        on_node_lost: Callable[[], None],
    ) -> None:
        self.pid: int | None = pid
        self.node, self.node_id = node.name, node.node_id
        self._node = node
        self._actor = actor
        self._process = pid
        self._watch = watch
        self._log = log
        self._on_end = on_end
        self._on_node_lost = on_node_lost
        self._end = asyncio.create_task(self._await_end(life))

    @property
    def node_silent_s(self) -> float:
        return 0.0 if self._watch is None else self._watch.silent_s

    async def _await_end(self, life: Any) -> RankExit:
        try:
            code = await asyncio.wrap_future(life.future())
            end = RankExit(f"process {self._process} exited with code {code}" if code else "")
        except RayTaskError as error:
            end = RankExit(f"process {self._process}: {type(error.cause).__name__}: {error.cause}")
        except ActorUnavailableError as error:  # its raylet or the way to it is gone: Ray cannot say whether it lives
            text = summary(str(error)).rpartition("temporarily unavailable: ")[2]
            end = RankExit(f"process {self._process}: Ray has lost touch with it: {text}", abrupt=True)
        except RayActorError as error:
            detail = f"; Ray says: {text}" if (text := summary(str(error))) else ""
            end = RankExit(f"process {self._process} was killed or crashed{detail}", abrupt=True)
        except RayError as error:  # the cluster has lost the answer: nothing will be heard of the process again
            end = RankExit(f"process {self._process}: Ray says: {summary(str(error))}", abrupt=True)
        if end.abrupt and self._watch is not None and not (await answers(self._node) and await is_in_cluster(self.node_id)):
            self._on_node_lost()
            end = dataclasses.replace(end, is_node_lost=True)
        await self._remove()
        return end

    async def _remove(self) -> None:
        """An actor whose method has returned is idle, not gone."""
        await kill_actor(self._actor)
        if self._watch is not None:  # of another node's processes Ray's word is all that there is
            self._watch.close()
        else:
            for _ in range(int(GONE_TIMEOUT_S / 0.02)):
                if not _exists(self._process):
                    break
                await asyncio.sleep(0.02)
        if self._log is not None:
            await self._log.drain(timeout_s=1.0)
            self._log.close()
        self._on_end()

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    async def wait(self) -> RankExit:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        if self._end.done():
            return
        if self._watch is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)  # it is on this node; `ray.kill` alone takes longer
        else:
            await kill_actor(self._actor)
        is_node_lost = self.node_silent_s >= LOST_NODE_S
        if is_node_lost:
            self._on_node_lost()
        timeout_s = 0.0 if is_node_lost else END_TIMEOUT_S + GONE_TIMEOUT_S
        await asyncio.wait({self._end}, timeout=timeout_s)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

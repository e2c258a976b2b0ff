"""Questions and orders to Ray, each with a bound. Knows no ranks.

A cluster whose head is dead answers after minutes or never. So every call runs in a daemon thread: one that waits for ever must
not keep the launcher alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from cores.launch.interface import LaunchError
from cores.launch.ray_summary import summary

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_TIMEOUT_S = 10.0
NODE_ENDED_TIMEOUT_S = 1.0  # for Ray's word about a node, while requests wait for a rank's death to be told


async def in_thread(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """The result of a call that may never return. Raises `LaunchError` when the time is over or Ray refuses."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself
        else:
            future.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise LaunchError(f"{what} took longer than {timeout_s:g} s") from None
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"{what} failed: {summary(str(error))}") from error


async def is_in_cluster(node_id: str) -> bool:
    """Whether Ray still counts on that node: one that it has given up ends a moment later, although it answers."""
    try:
        rows: list[dict[str, Any]] = await in_thread(ray.nodes, NODE_ENDED_TIMEOUT_S, "asking Ray for its nodes")
    except LaunchError:
        return True  # Ray's head is gone, say: that says nothing of nodes
    return any(row["NodeID"] == node_id and row["Alive"] for row in rows)


async def kill_actor(actor: Any) -> None:
    if actor is not None:
        with contextlib.suppress(LaunchError):  # dead already, or its cluster is
            await in_thread(lambda: ray.kill(actor), END_TIMEOUT_S, "killing an actor")

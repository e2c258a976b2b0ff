"""Orders of an operator that the launcher has and has not answered yet. Knows no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cores.codec import Message
from cores.control_messages import GroupOrder, GroupOrderDone
from gateway.errors import EngineDeadError, GatewayError, InvalidRequestError


class Orders:
    """`send` takes a message to the launcher, which bounds every order; whoever sees the launcher end calls `fail_all`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[None]] = {}  # by id
        self._last_id = 0

    async def give(self, action: str, rank: int, size: int, drain_timeout_s: float) -> None:
        """Returns when it is carried out. Raises what the launcher answers."""
        self._last_id += 1
        order = GroupOrder(self._last_id, action, rank, size, drain_timeout_s)
        done = self._open[order.order_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            await done
        finally:
            del self._open[order.order_id]

    def on_done(self, answer: GroupOrderDone) -> None:
        done = self._open.get(answer.order_id)
        if done is None or done.done():
            return  # its caller has left
        if answer.error is None:
            done.set_result(None)
        elif answer.error_kind == "failed":
            done.set_exception(EngineDeadError(answer.error, cause=answer.error))
        else:
            status = 404 if answer.error_kind == "unknown rank" else 409
            done.set_exception(InvalidRequestError(answer.error, status=status))

    def fail_all(self, error: GatewayError) -> None:
        for done in self._open.values():
            if not done.done():
                done.set_exception(error)

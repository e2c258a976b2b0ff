"""Aborts by id that reach every front end: any of them may hold the request, and whoever asked may want to know whether it did.
Knows no sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cores.codec import Message
from cores.control_messages import AbortedElsewhere, AbortElsewhere
from cores.words import counted
from gateway.errors import OverloadedError

ANSWER_TIMEOUT_S = 10.0  # one that is starting again has nothing, and answers when it is there; one that is stopped does not


class AbortsElsewhere:
    """`send` takes a message to the launcher, which passes it on to the others. `on_abort` is set by whoever knows requests: it
    aborts those of that id and tenant, and says whether there were any."""

    def __init__(
        self, send: Callable[[Message], None], index: int, num_others: int, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self.on_abort: Callable[[str | None, str | None], bool] = lambda request_id, tenant: False
        self._send = send
        self._index = index
        self._num_others = num_others
        self._timeout_s = timeout_s
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._num_silent: dict[int, int] = {}  # who have not answered yet, by call
        self._last_id = 0

    def tell(self, request_id: str | None, tenant: str | None = None) -> None:
        """They abort their requests of that id (None: all that no rank has yet) and tenant (None: whoever's), too."""
        if self._num_others:
            self._send(AbortElsewhere(request_id, tenant))

    async def ask(self, request_id: str, tenant: str | None) -> bool:
        """The same, and whether any of them had one. Raises `OverloadedError` when that is not known in time."""
        if not self._num_others:
            return False
        self._last_id += 1
        call_id = self._last_id
        found = self._asked[call_id] = asyncio.get_running_loop().create_future()
        self._num_silent[call_id] = self._num_others
        try:
            self._send(AbortElsewhere(request_id, tenant, self._index, call_id))
            return await asyncio.wait_for(found, self._timeout_s)
        except TimeoutError:
            num_silent = counted(self._num_silent[call_id], "front end")
            raise OverloadedError(f"{num_silent} did not answer within {self._timeout_s:g} s, and may have it") from None
        finally:
            del self._asked[call_id], self._num_silent[call_id]

    def on_message(self, message: AbortElsewhere | AbortedElsewhere) -> None:
        if isinstance(message, AbortElsewhere):
            found = self.on_abort(message.request_id, message.tenant)
            if message.call_id:
                self._send(AbortedElsewhere(message.asker, message.call_id, found))
        elif (asked := self._asked.get(message.call_id)) is not None and not asked.done():
            self._num_silent[message.call_id] -= 1
            if message.found or self._num_silent[message.call_id] == 0:
                asked.set_result(message.found)

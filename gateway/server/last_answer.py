"""The answer that ends its connection while the client may still be sending."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.server.failure import Failure

LINGER_S = 5.0


class LastAnswer(web.Response):
    """Closes, but not at once: with unread input a close resets the connection, which fails the client's next write and may
    take the answer from it. So whatever comes is dropped, unparsed, until the client closes too, for `LINGER_S` at most."""

    def __init__(self, failure: Failure, connection: web.RequestHandler) -> None:
        super().__init__(
            status=failure.status,
            body=failure.body(),
            content_type="application/json",
            charset="utf-8",
            headers=failure.headers(),
        )
        self.force_close()
        self._connection = connection

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        connection, transport = self._connection, self._connection.transport
        connection.close()  # reads on, but parses nothing
        connection.resume_reading()
        if transport is not None and not transport.is_closing():
            if transport.can_write_eof():  # not so with TLS
                transport.write_eof()  # a client that reads to the end need not wait
            # Cancelled by the end of the connection.
            await asyncio.sleep(LINGER_S)
        connection.force_close()

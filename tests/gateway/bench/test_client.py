"""The client of `gateway bench` against a server that ends connections when it is least expected."""

from __future__ import annotations

import asyncio

from gateway.bench.client import BenchClient, RequestResult
from gateway.bench.workload import PlannedRequest

STREAM = b'data: {"error": {"message": "rank 0 died"}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"


class EndsKeptConnections:
    """Answers the first request of each connection with an error in the stream, promises to keep the connection, and ends it
    when the next request arrives."""

    def __init__(self) -> None:
        self.requests_by_connection: list[int] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests_by_connection)
        self.requests_by_connection.append(0)
        for answer in (HEAD % len(STREAM) + STREAM, b""):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            self.requests_by_connection[number] += 1
            writer.write(answer)
        writer.close()


async def test_a_kept_connection_that_ends_as_the_next_request_goes_out_is_no_error_of_that_request() -> None:
    handler = EndsKeptConnections()
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with BenchClient(f"http://127.0.0.1:{port}") as client:
            results: list[RequestResult] = [await client.send(PlannedRequest((1, 2), 4), {}) for _ in range(2)]
    assert [result.error for result in results] == ["in the stream: rank 0 died"] * 2
    assert handler.requests_by_connection == [2, 1]


async def test_a_stream_that_breaks_off_is_called_that() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b'20\r\ndata: {"choices":[{"text":"x"}]}\r\n')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with BenchClient(f"http://127.0.0.1:{port}") as client:
            result = await client.send(PlannedRequest((1, 2), 4), {})
    assert result.error == "the stream broke off"

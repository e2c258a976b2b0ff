"""What benchmarks share: rows say what was measured and against whom, and the load client counts what a server sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator

import pytest

from scripts.benchmarks.load import LoadError, closed_loop
from scripts.benchmarks.prompts import chat_body, completion_body
from scripts.benchmarks.report import Row, compare, table

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
PIECE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# As pieces of one answer: what a server writes at a time.
STREAM = [CHUNKED_HEAD + chunk(ROLE), chunk(PIECE), chunk(PIECE) + chunk(PIECE), chunk(USAGE), b"0\r\n\r\n"]
WHOLE = USAGE.removeprefix(b"data: ").partition(b"\n")[0]
PLAIN = [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(WHOLE), b"\r\n", WHOLE[:40], WHOLE[40:]]
REFUSAL = [b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 8\r\n\r\n{"no":1}']


@contextlib.contextmanager
def server_that_says(pieces: list[bytes]) -> Iterator[int]:
    """Its port. Every request gets the same answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                json.loads(await reader.readexactly(length))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_a_streamed_answer_is_counted_by_its_events_and_its_usage() -> None:
    with server_that_says(STREAM) as port:
        result = closed_loop(port, "/v1/chat/completions", [{}] * 7, concurrency=2)
    assert (result.num_requests, result.tokens, result.prompt_tokens, result.chunks) == (7, 21, 35, 35)
    assert len(result.ttft_s) == 7  # the role has no text
    assert len(result.itl_s) == 7 * 3
    assert 0 < result.duration_s < 60
    assert all(gap >= 0 for gap in result.ttft_s + result.itl_s)


def test_an_answer_that_is_not_streamed_ends_with_its_length() -> None:
    with server_that_says(PLAIN) as port:
        result = closed_loop(port, "/v1/completions", [{}] * 5, concurrency=1)
    assert (result.num_requests, result.tokens, result.chunks) == (5, 15, 0)


def test_a_server_that_refuses_is_not_measured() -> None:
    with server_that_says(REFUSAL) as port, pytest.raises(LoadError, match="503"):
        closed_loop(port, "/v1/completions", [{}] * 5, concurrency=1)


def test_prompts_have_their_length_and_share_nothing() -> None:
    rng = random.Random(0)
    bodies = [chat_body(rng, 58, 16) for _ in range(3)]
    contents = [body["messages"][0]["content"] for body in bodies]
    assert [len(content.split()) for content in contents] == [58] * 3
    assert len({content[:40] for content in contents}) == 3
    body = completion_body(rng, [3, 4, 5], 94, 64)
    assert (len(body["prompt"]), body["max_tokens"], body["stream"]) == (94, 64, True)


def test_a_row_compares_medians() -> None:
    assert compare("speed", "tok/s", [3.0, 1.0, 2.0], "other", [8.0, 2.0, 4.0]) == Row("speed", 2.0, "other", 4.0, 0.5, "tok/s")


def test_a_missing_peer_is_said_and_never_guessed() -> None:
    row = compare("speed", "tok/s", [2.0], "other", None)
    assert (row.ours, row.peer, row.peer_value, row.ratio) == (2.0, "other: not installed", None, None)
    assert "other: not installed" in table([row])

"""What streams promise on the wire: order, ends, errors, disconnects and slow readers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import pytest
import uvloop
from aiohttp import ClientSession, UnixConnector

from gateway.config import GatewayConfig
from gateway.errors import EngineDeadError, EngineGenerateError, OverloadedError
from gateway.server import ServerState, run_server
from gateway.server.responding import CLOSE_DELAY_S
from gateway.testing import FakeEngineClient, FakeRequest, says, waits

CHAT = "/v1/chat/completions"
DEADLINE_S = 60.0


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The server runs on uvloop, an embedder's may not: what a transport does with a slow or lost client differs."""
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello?"}], **fields}


def raw_chat(**fields: Any) -> bytes:
    payload = json.dumps(chat(**fields)).encode()
    return f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload


async def test_a_stream_has_its_role_first_its_one_finish_reason_last_and_done(serve: Any) -> None:
    served = await serve()
    events, response = await served.events(CHAT, chat())
    assert response.status == 200
    assert response.content_type == "text/event-stream"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1] == "[DONE]"
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


async def test_usage_is_a_chunk_of_its_own_before_done(serve: Any) -> None:
    served = await serve()
    events, _ = await served.events(CHAT, chat(stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len("Hello, big world")
    assert all("usage" not in event for event in events[:-2])


async def test_continuous_usage_counts_up_in_every_chunk(serve: Any) -> None:
    served = await serve()
    events, _ = await served.events(CHAT, chat(stream_options={"continuous_usage_stats": True}))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 6, 10, 16]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_where_usage_is_forced_every_chunk_of_every_stream_has_it(serve: Any, options: dict[str, Any]) -> None:
    served = await serve(enable_force_include_usage=True)
    for path, body, expected in (
        (CHAT, chat(**options), [0, 6, 10, 16, 16]),
        ("/v1/completions", {"prompt": "a", **options}, [6, 10, 16, 16]),
    ):
        events, _ = await served.events(path, body)
        assert [event["usage"]["completion_tokens"] for event in events[:-1]] == expected
        assert events[-2]["choices"] == []


async def test_headers_wait_for_the_first_output_and_name_its_rank(serve: Any) -> None:
    served = await serve(waits)
    reader, writer = await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    request.rank = 3
    request.put("Hel")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "X-Gateway-Rank: 3\r\n" in head
    assert b'"content":"Hel"' in await reader.readuntil(b'"Hel"')
    request.put("lo", finish_reason="stop")
    assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), DEADLINE_S)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def test_an_error_before_the_first_output_is_an_ordinary_answer(serve: Any) -> None:
    served = await serve(lambda request: request.fail(EngineGenerateError("bad logits")))
    for stream in (False, True):
        status, body, response = await served.post(CHAT, chat(stream=stream))
        assert status == 500
        assert response.content_type == "application/json"
        assert body["error"] == {
            "message": "bad logits", "type": "engine_error", "param": None, "code": "engine_generate_error",
        }  # fmt: skip


async def test_an_error_in_a_stream_is_its_last_event_and_ends_the_connection(serve: Any) -> None:
    served = await serve(waits)
    reader, writer = await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    request.put("Hel")
    request.fail(EngineDeadError("rank 0 died: out of memory"))
    data = await asyncio.wait_for(reader.read(), DEADLINE_S)  # to the end of the connection
    assert b'"content":"Hel"' in data
    assert b"[DONE]" not in data
    last_event = data[data.rindex(b"data: ") :].split(b"\n\n")[0]
    error = json.loads(last_event.removeprefix(b"data: "))["error"]
    assert error["message"] == "rank 0 died: out of memory"
    assert error["code"] == "engine_dead"
    assert data.endswith(b"0\r\n\r\n"), "the body must still end in order"
    writer.close()


async def test_a_client_that_goes_on_at_once_after_an_error_keeps_its_connection(serve: Any) -> None:
    """Its next request must not be lost to a connection that is just being closed."""
    served = await serve(waits)
    reader, writer = await served.raw(raw_chat(stream=True))
    for number in range(3):
        request = await served.engine.next_request(number)
        request.put("Hel")
        request.fail(EngineDeadError("rank 0 died"))
        await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), DEADLINE_S)
        writer.write(raw_chat(stream=True))
    request = await served.engine.next_request(3)
    timers_are_over = asyncio.Event()
    asyncio.get_running_loop().call_later(CLOSE_DELAY_S, timers_are_over.set)  # behind those that might close
    await timers_are_over.wait()
    request.put("lo", finish_reason="stop")
    assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), DEADLINE_S)


async def test_a_bug_in_a_stream_tells_the_client_nothing_but_that(serve: Any, caplog: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put("Hel")
        request.fail(ZeroDivisionError("secret detail"))  # type: ignore[arg-type]  # a bug raises anything

    served = await serve(script)
    events, _ = await served.events(CHAT, chat())
    assert events[-1]["error"]["code"] == "internal"
    assert "secret" not in json.dumps(events)
    assert "secret detail" in caplog.text


async def test_a_choice_without_a_finish_reason_is_an_error_not_a_done(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        request.put("one", 0, finish_reason="stop")
        request._unfinished.clear()  # an engine client that forgets the second sequence

    served = await serve(script)
    events, _ = await served.events(CHAT, chat(n=2))
    assert events[-1]["error"]["code"] == "internal"
    assert "[DONE]" not in events


async def test_a_client_that_leaves_a_stream_aborts_its_request(serve: Any) -> None:
    served = await serve(waits)
    reader, writer = await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    request.put("Hel")
    await reader.readuntil(b'"Hel"')
    writer.close()
    await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
    assert served.engine.aborted == [request.request_id]


async def test_a_client_that_leaves_before_the_first_token_aborts_its_request(serve: Any) -> None:
    served = await serve(waits)
    for stream in (True, False):
        served.engine.requests.clear()
        served.engine.aborted.clear()
        _, writer = await served.raw(raw_chat(stream=stream))
        request = await served.engine.next_request()
        writer.close()
        await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
        assert served.engine.aborted == [request.request_id]


async def test_a_client_that_leaves_a_many_prompt_request_aborts_all_of_it(serve: Any) -> None:
    served = await serve(waits)
    payload = json.dumps({"prompt": ["a", "b", "c"], "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    _, writer = await served.raw(head + payload)
    await served.engine.next_request(2)
    served.engine.requests[1].put("x")  # one has begun
    writer.close()
    for request in served.engine.requests:
        await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
    assert len(served.engine.aborted) == 3


async def test_one_failing_prompt_fails_the_request_and_aborts_the_others(serve: Any) -> None:
    def script(request: FakeRequest) -> None:
        if request.prompt_text == "b":
            request.fail(OverloadedError("full"))

    served = await serve(script)
    status, body, _ = await served.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert (status, body["error"]["message"]) == (503, "full")
    assert all(request.ended.is_set() for request in served.engine.requests)
    assert len(served.engine.aborted) == 2


async def test_a_finished_stream_is_not_aborted_and_its_connection_serves_on(serve: Any) -> None:
    served = await serve()
    reader, writer = await served.raw(b"")
    for _ in range(3):
        writer.write(raw_chat(stream=True))
        assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), DEADLINE_S)
    assert len(served.engine.requests) == 3
    assert served.engine.aborted == []
    writer.close()


async def test_tokens_for_a_slow_reader_merge_and_none_is_lost() -> None:
    """Small socket buffers, a client that reads nothing: the handler must stop, and what comes meanwhile become one chunk."""
    engine = FakeEngineClient(waits)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted sockets inherit it
    listener.bind(("127.0.0.1", 0))
    server = await run_server(ServerState(GatewayConfig(), engine), listener)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listener.getsockname())
    client.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    writer.write(raw_chat(stream=True))
    request = await engine.next_request()
    request.merges_unread = True

    num_pieces, max_pieces = 0, 5000
    while request.num_unread < 20 and num_pieces < max_pieces:
        request.put(f"{num_pieces:05d}" * 200)
        num_pieces += 1
        for _ in range(3):  # more turns than the handler needs for one output
            await asyncio.sleep(0)
    assert num_pieces < max_pieces, "the handler never waited for its reader"
    request.put("!", finish_reason="stop")

    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await asyncio.wait_for(reader.read(65536), DEADLINE_S)
    chunks = [json.loads(line[6:]) for line in dechunk(data).splitlines() if line.startswith(b'data: {"id"')]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "".join(f"{i:05d}" * 200 for i in range(num_pieces)) + "!"
    assert len(chunks) < num_pieces
    writer.close()
    await server.stop(1.0)


def dechunk(data: bytes) -> bytes:
    """The body of a response in HTTP's chunked encoding."""
    rest, body = data.split(b"\r\n\r\n", 1)[1], b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def test_stopping_lets_a_stream_finish_within_its_time(serve: Any) -> None:
    served = await serve(waits)
    reader, writer = await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    request.put("Hel")
    await reader.readuntil(b'"Hel"')
    stopping = asyncio.ensure_future(served.server.stop(DEADLINE_S))
    await asyncio.sleep(0)
    request.put("lo", finish_reason="stop")
    assert b"[DONE]" in await asyncio.wait_for(reader.read(), DEADLINE_S)
    await asyncio.wait_for(stopping, DEADLINE_S)
    writer.close()


async def test_stopping_ends_what_does_not_finish_in_time(serve: Any) -> None:
    served = await serve(waits)
    reader, writer = await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    request.put("Hel")
    await reader.readuntil(b'"Hel"')
    await asyncio.wait_for(served.server.stop(0.05), DEADLINE_S)
    await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
    await asyncio.wait_for(reader.read(), DEADLINE_S)  # the connection is closed
    await served.server.stop()  # a second time: nothing happens
    writer.close()


async def test_a_unix_socket_serves_too(tmp_path: Any) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "gateway.sock"))
    server = await run_server(ServerState(GatewayConfig(), FakeEngineClient(says("hi"))), listener)
    async with (
        ClientSession(connector=UnixConnector(str(tmp_path / "gateway.sock"))) as http,
        http.post("http://gateway" + CHAT, json=chat()) as response,
    ):
        assert (await response.json())["choices"][0]["message"]["content"] == "hi"
    await server.stop(1.0)


async def test_a_client_that_resets_before_its_streams_head_leaves_no_traceback(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(waits)
    await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    request.put("Hel")  # wakes the handler, which finds the connection gone before it is told so
    for protocol in served.state.busy_connections:
        protocol.transport.abort()
    await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
    await served.server.stop(1.0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert served.state.metrics.answers == {499: 1}


@pytest.mark.parametrize("stage", ["before the head", "in the stream", "after the end"])
async def test_a_client_that_leaves_is_counted_once_and_only_if_its_answer_was_not_complete(serve: Any, stage: str) -> None:
    served = await serve(waits)
    answers = served.state.metrics.answers
    reader, writer = await served.raw(raw_chat(stream=True))
    request = await served.engine.next_request()
    if stage != "before the head":
        request.put("Hel")
        await reader.readuntil(b'"Hel"')
    if stage == "after the end":
        request.put("lo", finish_reason="stop")
        await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
    await served.server.stop(1.0)  # all handlers have ended
    assert answers == {200 if stage == "after the end" else 499: 1}


async def test_answers_are_counted_by_status_also_those_that_no_engine_heard_of_and_those_of_probes_are_not(serve: Any) -> None:
    served = await serve()
    for body in ({}, {"messages": []}, chat(model="unknown")):
        await served.post(CHAT, body)
    await served.get("/health")
    await served.get("/nowhere")
    served.engine.overload = OverloadedError("full")
    await served.post(CHAT, chat())
    served.engine.overload = None
    await served.post(CHAT, chat())
    assert served.state.metrics.answers == {200: 1, 400: 2, 404: 1, 503: 1}

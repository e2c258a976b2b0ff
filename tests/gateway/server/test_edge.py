"""What surrounds every route: ids, keys, and one shape for everything that is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.errors import DeadlineExceededError, EngineDeadError, OverloadedError

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}
DEADLINE_S = 60.0


async def answer_to(served: Any, data: bytes) -> tuple[bytes, bytes]:
    """(head, body) of what a raw request gets before the connection ends."""
    reader, _ = await served.raw(data)
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def test_the_callers_request_id_is_echoed_once_and_reaches_the_engine(serve: Any) -> None:
    served = await serve()
    for path_body in (BODY, {**BODY, "stream": True}):
        async with served.http.post(served.url + CHAT, json=path_body, headers={"X-Request-Id": "my-id 7"}) as response:
            await response.read()
            assert response.headers.getall("X-Request-Id") == ["my-id 7"]
        assert served.engine.requests[-1].request_id == "my-id 7"


async def test_a_request_without_id_gets_a_fresh_one_also_when_it_fails(serve: Any) -> None:
    served = await serve()
    ids = []
    for path in ("/health", "/nope", "/v1/models"):
        _, _, response = await served.get(path)
        ids.append(response.headers["X-Request-Id"])
    assert len(set(ids)) == 3
    assert all(len(bytes.fromhex(request_id)) == 16 for request_id in ids)


@pytest.mark.parametrize("bad", ["", "x" * 257, "é"])
async def test_a_request_id_that_cannot_be_echoed_is_refused(serve: Any, bad: str) -> None:
    served = await serve()
    head, body = await answer_to(
        served, f"GET /health HTTP/1.1\r\nHost: t\r\nX-Request-Id: {bad}\r\nConnection: close\r\n\r\n".encode()
    )
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["param"] == "X-Request-Id"


async def test_routing_headers_reach_the_engine(serve: Any) -> None:
    served = await serve()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {
        "X-data-parallel-rank": "3", "X-Session-Id": "alice", "traceparent": trace, "X-Request-Timeout-Ms": "1500",
    }  # fmt: skip
    status, _, response = await served.post(CHAT, {**BODY, "priority": -2, "cache_salt": "s"}, **headers)
    assert status == 200
    assert response.headers["X-Gateway-Rank"] == "0"
    options = served.engine.requests[0].options
    assert options["data_parallel_rank"] == 3
    assert options["session_id"] == "alice"
    assert options["trace_headers"] == {"traceparent": trace}
    assert options["priority"] == -2
    assert options["cache_salt"] == "s"
    assert options["timeout_s"] == 1.5


@pytest.mark.parametrize("bad", ["0", "-1", "1.5", "1e3", "soon", "1000000000"])
async def test_a_timeout_that_is_no_number_of_milliseconds_is_refused(serve: Any, bad: str) -> None:
    served = await serve()
    status, body, _ = await served.post(CHAT, BODY, **{"X-Request-Timeout-Ms": bad})
    assert status == 400
    assert body["error"]["param"] == "X-Request-Timeout-Ms"
    assert repr(bad) in body["error"]["message"]


@pytest.mark.parametrize("bad", ["one", "1.0", "1_0", "+1", " ", "99999999999"])
async def test_a_rank_that_is_no_number_is_refused(serve: Any, bad: str) -> None:
    served = await serve()
    status, body, _ = await served.post(CHAT, BODY, **{"X-data-parallel-rank": bad})
    assert status == 400
    assert body["error"]["param"] == "X-data-parallel-rank"
    assert repr(bad.strip()) in body["error"]["message"]


async def test_unknown_routes_and_methods_have_openais_shape(serve: Any) -> None:
    served = await serve()
    status, body, _ = await served.post("/v1/nope", {})
    assert (status, body["error"]["code"]) == (404, "unknown_route")
    assert "POST /v1/nope" in body["error"]["message"]
    status, text, response = await served.get(CHAT)
    assert (status, json.loads(text)["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["Allow"] == "POST"
    assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nope", "/tokenize", "/status", "/load", "/admin/ranks/0/drain"])
async def test_everything_but_the_probes_needs_the_key(serve: Any, path: str) -> None:
    served = await serve(api_key=("secret",))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Basic secret"}):
        status, text, response = await served.get(path, **headers)
        assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["WWW-Authenticate"] == "Bearer"
    status, _, _ = await served.get(path, Authorization="bearer secret")
    assert status != 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/metrics", "/version"])
async def test_probes_need_no_key(serve: Any, path: str) -> None:
    served = await serve(api_key=("secret",))
    assert (await served.get(path))[0] == 200


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "no body"),
        (b"{", "not valid JSON"),
        (b'{"messages": [{"role": "\xff"}]}', "not valid JSON"),
        (b'{"n": "a", "messages"', "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b"[]", "the body must be object"),
        (b'{"messages": []} trailing', "not valid JSON"),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(serve: Any, body: bytes, part: str) -> None:
    served = await serve()
    async with served.http.post(served.url + CHAT, data=body) as response:
        assert response.status == 400
        assert part in (await response.json())["error"]["message"]


async def test_a_body_above_the_limit_is_413(serve: Any) -> None:
    served = await serve(max_body_bytes=1000)
    status, body, _ = await served.post(CHAT, {**BODY, "user": "x" * 1000})
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert "1000" in body["error"]["message"]
    assert (await served.post(CHAT, BODY))[0] == 200


async def test_a_body_that_does_not_come_is_408(serve: Any) -> None:
    served = await serve()
    served.state.body_timeout_s = 0.05
    reader, _ = await served.raw(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nhalf".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert head.startswith(b"HTTP/1.1 408")
    assert b'"code":"body_timeout"' in await reader.readuntil(b"}}")


async def test_each_kind_of_failure_has_its_status_and_one_log_line(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve()
    for error, expected in [
        (OverloadedError("full", 7.2), 503),
        (DeadlineExceededError("too late"), 504),
        (EngineDeadError("rank 0 died"), 503),
        (NotImplementedError("later"), 501),
        (ZeroDivisionError("a bug"), 500),
    ]:
        served.engine.script = lambda request, error=error: request.fail(error)
        caplog.clear()
        status, body, response = await served.post(CHAT, BODY, **{"X-Request-Id": "id-1"})
        assert status == expected
        assert ("Retry-After" in response.headers) == (expected == 503)
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "id-1" in record.getMessage()
        assert bool(record.exc_info) == isinstance(error, ZeroDivisionError)
        assert ("a bug" in body["error"]["message"]) is False


async def test_load_counts_requests_in_flight(serve: Any) -> None:
    served = await serve(lambda request: None)
    payload = json.dumps(BODY)
    await served.raw(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(payload)}\r\n\r\n{payload}".encode())
    request = await served.engine.next_request()
    assert json.loads((await served.get("/load"))[1]) == {"server_load": 1}
    request.put("hi", finish_reason="stop")
    await asyncio.wait_for(request.ended.wait(), DEADLINE_S)
    assert json.loads((await served.get("/load"))[1]) == {"server_load": 0}


@pytest.mark.parametrize("bad", [b"", b"x" * 257, b"\xff\xfe", "é".encode()])
async def test_a_session_id_that_no_engine_can_be_sent_is_refused_and_no_internal_error(serve: Any, bad: bytes) -> None:
    served = await serve()
    payload = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {len(payload)}\r\nX-Session-Id: "
    head, body = await answer_to(served, head.encode() + bad + b"\r\n\r\n" + payload)
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["param"] == "X-Session-Id"


async def test_a_path_with_line_breaks_writes_no_lines_of_its_own_into_the_log(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    with caplog.at_level(logging.INFO):
        _, body = await answer_to(served, b"GET /a%0aERROR%20forged%1b[31m HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        await served.post(CHAT, {**BODY, "chat_template_kwargs": {"a\nERROR forged": 1}, "continue_final_message": True})
    assert "/a%0aERROR%20forged%1b" in json.loads(body)["error"]["message"]
    assert all(line.isprintable() for line in caplog.messages)

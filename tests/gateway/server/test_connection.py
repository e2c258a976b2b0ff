"""What is refused before it is a request of the application, and what HTTP leaves to the server. Over raw sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.server.connection import MAX_FIELD_BYTES, MAX_FIELDS, MAX_TARGET_BYTES
from gateway.server.content_encoding import decompress

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}
PAYLOAD = json.dumps(BODY).encode()
DEADLINE_S = 60.0
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))
WEBSOCKET = (
    "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)  # fmt: skip


def message(line: str, *headers: str, body: bytes = b"") -> bytes:
    length = (f"Content-Length: {len(body)}",) if body else ()
    return "\r\n".join((line, "Host: t", *headers, *length)).encode() + b"\r\n\r\n" + body


def post(*headers: str, body: bytes = PAYLOAD) -> bytes:
    return message(f"POST {CHAT} HTTP/1.1", "Connection: close", *headers, body=body)


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return message(f"{method} {path} HTTP/1.1", "Connection: close", *headers)


async def answer_to(served: Any, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, what comes behind them) of all that comes until the server closes."""
    reader, _ = await served.raw(data)
    return parse(await asyncio.wait_for(reader.read(), DEADLINE_S))


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    assert len(headers) == len({name.lower() for name, _ in headers}), "a header is there twice"
    return int(status_line.split()[1]), dict(headers), rest


def error_in(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("data", "status", "part"),
    [
        (b"garbage\r\n\r\n", 400, "Invalid method"),
        (b"\0" * 100, 400, "Invalid method"),
        (CLIENT_HELLO, 400, "HTTPS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", 400, "Invalid method"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "HTTP/1.1"),
        (message("GET /live HTTP/2.0"), 505, "HTTP/2.0"),
        (b"GET /live\r\n\r\n", 505, "HTTP/0.9"),
        (b"GET /live HTTP/1.1\r\n\r\n", 400, "'Host'"),
        (message("GET /live HTTP/1.1", "Host: u"), 400, "'Host'"),
        (message("GET /live HTTP/1.1", "A : b"), 400, "header token"),
        (message("GET http:///live HTTP/1.1"), 400, "target"),
        (message("GET /\xff HTTP/1.1"), 400, "target"),
        (get("/live", "X-Request-Id: a\rX-Forged: b"), 400, "LF"),
        (post("Content-Length: 3"), 400, "Content-Length"),
        (message("POST / HTTP/1.1", "Content-Length: 1x"), 400, "Content-Length"),
        (message("POST / HTTP/1.1", "Content-Length: " + "9" * 30), 400, "Content-Length"),
        (post("Transfer-Encoding: chunked"), 400, "Transfer-Encoding"),
        (message("POST / HTTP/1.1", "Transfer-Encoding: wonders") + b"0\r\n\r\n", 400, "Transfer-Encoding"),
        (message("POST / HTTP/1.1", "Transfer-Encoding: chunked") + b"zz\r\n", 400, "chunk size"),
        (post("Content-Type: a/b", "Content-Type: c/d"), 400, "'Content-Type'"),
        (get("/live", "X-Giant: " + "a" * (MAX_FIELD_BYTES + 1)), 431, f"{MAX_FIELD_BYTES} bytes"),
        (get("/live", *(f"X-{i}: a" for i in range(MAX_FIELDS))), 431, f"{MAX_FIELDS} header fields"),
        (get("/live?" + "a" * MAX_TARGET_BYTES), 414, f"{MAX_TARGET_BYTES} bytes"),
        (message("CONNECT t:443 HTTP/1.1") + CLIENT_HELLO, 501, "no proxy"),
        (post("Expect: wonders"), 417, "'wonders'"),
        (message("POST /v1/nope HTTP/1.1", "Expect: wonders"), 417, "100-continue"),
        (post("Content-Encoding: wonders"), 415, "gzip, deflate"),
        (post("Content-Encoding: br"), 415, "gzip, deflate"),
        (post("Content-Encoding: zstd"), 415, "gzip, deflate"),
        (post("Content-Encoding: gzip", "Content-Encoding: gzip"), 415, "'gzip, gzip'"),
        (message(f"POST {CHAT} HTTP/1.1", "Content-Length: 100000000000"), 413, "67108864 bytes"),
        (message("GET /live HTTP/1.1", "Content-Length: 100000000000"), 413, "67108864 bytes"),
    ],
)  # fmt: skip
async def test_what_never_becomes_a_request_is_answered_like_everything_else_and_the_connection_ends(
    serve: Any, caplog: pytest.LogCaptureFixture, data: bytes, status: int, part: str
) -> None:
    served = await serve()
    with caplog.at_level(logging.INFO):
        answer_status, headers, body = await answer_to(served, data)
        assert (answer_status, headers["Content-Type"]) == (status, "application/json; charset=utf-8")
        assert part in error_in(body)["message"]
        assert int(headers["Content-Length"]) == len(body), "nothing may come behind it"
        assert headers["Server"].startswith("gateway/")
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert record.getMessage().isprintable()
    assert headers["X-Request-Id"] in record.getMessage()
    assert served.engine.requests == []
    assert (await served.get("/live"))[0] == 200


@pytest.mark.parametrize("key", ["Bearer SECRET" + "x" * MAX_FIELD_BYTES, "Bearer SECRET\x01"])
async def test_a_key_in_a_header_that_is_refused_is_told_to_nobody(
    serve: Any, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    served = await serve()
    with caplog.at_level(logging.DEBUG):
        status, _, body = await answer_to(served, get("/v1/models", f"Authorization: {key}"))
    assert status in (400, 431)
    assert b"SECRET" not in body
    assert "SECRET" not in caplog.text


async def test_headers_as_long_as_tokens_and_baggage_get_are_taken(serve: Any) -> None:
    served = await serve(api_key=("k" * 30_000,))
    status, _, _ = await answer_to(served, get("/v1/models", "Authorization: Bearer " + "k" * 30_000, "baggage: " + "b" * 8192))
    assert status == 200


async def test_the_callers_id_is_echoed_by_early_refusals_too_if_it_can_be(serve: Any) -> None:
    served = await serve()
    for sent, echoed in (("mine", True), ("é", False), ("x" * 257, False), ("", False)):
        _, headers, _ = await answer_to(served, post("Expect: wonders", f"X-Request-Id: {sent}"))
        assert (headers["X-Request-Id"] == sent) == echoed
        assert headers["X-Request-Id"].isascii()


async def test_of_two_request_ids_the_first_counts(serve: Any) -> None:
    served = await serve()
    _, headers, _ = await answer_to(served, get("/live", "X-Request-Id: a", "X-Request-Id: b"))
    assert headers["X-Request-Id"] == "a"


async def test_a_client_that_asks_first_is_not_told_to_go_on_with_a_body_above_the_limit(serve: Any) -> None:
    served = await serve(max_body_bytes=1000)
    head = f"POST {CHAT} HTTP/1.1", "Expect: 100-continue"
    status, _, body = await answer_to(served, message(*head, "Content-Length: 1001"))
    assert (status, error_in(body)["code"]) == (413, "body_too_large")
    assert served.state.metrics.answers == {413: 1}
    reader, writer = await served.raw(message(*head, "Connection: close", f"Content-Length: {len(PAYLOAD)}"))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(PAYLOAD)
    assert parse(await asyncio.wait_for(reader.read(), DEADLINE_S))[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (message(f"POST {CHAT} HTTP/1.1", "Content-Length: 20000000"), 413),
        (message(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked") + b"1312d00\r\n", 413),
        (message(f"POST {CHAT} HTTP/1.1", "A : b", "Content-Length: 20000000"), 400),
    ],
)
async def test_a_client_that_sends_its_whole_body_before_it_reads_still_gets_the_refusal(
    serve: Any, head: bytes, status: int
) -> None:
    served = await serve(max_body_bytes=1000)
    reader, writer = await served.raw(head)
    for _ in range(20):
        writer.write(bytes(1_000_000))
        await asyncio.wait_for(writer.drain(), DEADLINE_S)
    answer_status, headers, body = parse(await asyncio.wait_for(reader.read(), DEADLINE_S))
    assert (answer_status, int(headers["Content-Length"])) == (status, len(body))
    error_in(body)


async def test_a_body_whose_chunks_break_is_refused_at_once_when_its_handler_waits_already(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    reader, writer = await served.raw(message(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n")
    assert (await served.get("/live"))[0] == 200  # a round trip later the handler waits for the rest
    with caplog.at_level(logging.INFO):
        writer.write(b"zz\r\nhello\r\n")
        status, _, body = parse(await asyncio.wait_for(reader.read(), DEADLINE_S))
    assert (status, error_in(body)["code"]) == (400, "invalid_body")
    assert "chunks are malformed" in error_in(body)["message"]
    assert len(caplog.records) == 1


async def test_a_body_in_chunks_is_read(serve: Any) -> None:
    served = await serve()
    chunks = b"".join(b"%x;extension=1\r\n%s\r\n" % (len(part), part) for part in (PAYLOAD[:10], PAYLOAD[10:]))
    head = message(f"POST {CHAT} HTTP/1.1", "Connection: close", "Transfer-Encoding: chunked")
    assert (await answer_to(served, head + chunks + b"0\r\nX-Trailer: a\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=x"])
async def test_json_is_read_whatever_it_is_called(serve: Any, content_type: str) -> None:
    """curl's `-d` calls it a form."""
    served = await serve()
    assert (await answer_to(served, post(f"Content-Type: {content_type}")))[0] == 200


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(PAYLOAD, mtime=0)),
        ("GZip", gzip.compress(PAYLOAD, mtime=0)),
        ("deflate", zlib.compress(PAYLOAD)),
        ("deflate", raw_deflate(PAYLOAD)),
        ("identity", PAYLOAD),
        ("", PAYLOAD),
    ],
)
async def test_compressed_bodies_are_understood(serve: Any, encoding: str, packed: bytes) -> None:
    served = await serve()
    assert (await answer_to(served, post(f"Content-Encoding: {encoding}", body=packed)))[0] == 200


@pytest.mark.parametrize(
    ("encoding", "data", "part"),
    [
        ("gzip", b"no gzip", "header"),
        ("gzip", zlib.compress(PAYLOAD), "header"),
        ("gzip", gzip.compress(PAYLOAD, mtime=0)[:-1], "too early"),
        ("gzip", gzip.compress(PAYLOAD, mtime=0)[:-8] + b"\0" * 8, "check"),
        ("gzip", gzip.compress(PAYLOAD, mtime=0) * 2, "behind"),
        ("deflate", zlib.compress(PAYLOAD)[:-1], "too early"),
        ("deflate", raw_deflate(PAYLOAD)[:-1], "too early"),
        ("deflate", b"\xff" * 9, "invalid"),
    ],
)
async def test_a_broken_compressed_body_is_400_and_one_line_in_the_log(
    serve: Any, caplog: pytest.LogCaptureFixture, encoding: str, data: bytes, part: str
) -> None:
    served = await serve()
    with caplog.at_level(logging.INFO):
        status, _, body = await answer_to(served, post(f"Content-Encoding: {encoding}", body=data))
    assert (status, error_in(body)["code"], error_in(body)["param"]) == (400, "invalid_body", "Content-Encoding")
    assert part in error_in(body)["message"]
    (record,) = caplog.records
    assert record.exc_info is None


@pytest.mark.parametrize("bomb", [gzip.compress(b" " * 10_000_000, mtime=0), zlib.compress(b" " * 10_000_000)])
async def test_a_decompression_bomb_is_bounded_by_the_limit_of_bodies(serve: Any, bomb: bytes) -> None:
    served = await serve(max_body_bytes=len(bomb))
    encoding = "gzip" if bomb[:2] == b"\x1f\x8b" else "deflate"
    status, _, body = await answer_to(served, post(f"Content-Encoding: {encoding}", body=bomb))
    assert (status, error_in(body)["code"]) == (413, "body_too_large")


def test_a_body_may_be_as_large_as_the_limit_and_no_larger() -> None:
    assert decompress(gzip.compress(b"x" * 1000), "gzip", 1000) == b"x" * 1000
    with pytest.raises(InvalidRequestError, match="larger than 999 bytes"):
        decompress(gzip.compress(b"x" * 1000), "gzip", 999)


async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(serve: Any) -> None:
    """Also if it asked to keep it: without chunks nothing else tells it that the stream is over."""
    served = await serve()
    body = json.dumps({**BODY, "stream": True}).encode()
    for headers in ((), ("Connection: keep-alive",)):
        status, sent, stream = await answer_to(served, message(f"POST {CHAT} HTTP/1.0", *headers, body=body))
        assert status == 200
        assert "Transfer-Encoding" not in sent
        assert "Connection" not in sent
        assert stream.endswith(b"data: [DONE]\n\n")


async def test_http_1_0_closes_unless_asked_to_keep_the_connection(serve: Any) -> None:
    served = await serve()
    assert (await answer_to(served, message("GET /live HTTP/1.0")))[0] == 200
    keep, last = message("GET /live HTTP/1.0", "Connection: keep-alive"), message("GET /version HTTP/1.0")
    status, headers, rest = await answer_to(served, keep + last)
    assert (status, headers["Connection"], headers["Content-Length"]) == (200, "keep-alive", "0")
    assert rest.startswith(b"HTTP/1.0 200")


async def test_pipelined_requests_are_answered_in_their_order(serve: Any) -> None:
    served = await serve()
    first = message(f"POST {CHAT} HTTP/1.1", "X-Request-Id: 1", body=PAYLOAD)
    others = [message(f"GET {path} HTTP/1.1", f"X-Request-Id: {i}") for i, path in enumerate(("/live", "/v1/nope"), 2)]
    reader, _ = await served.raw(b"".join([first, *others, get("/version", "X-Request-Id: 4")]))
    answers = await asyncio.wait_for(reader.read(), DEADLINE_S)
    order = [int(part.split(b"\r\n")[0]) for part in answers.split(b"X-Request-Id: ")[1:]]
    assert order == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "path", ["/live", "/health", "/ready", "/version", "/status", "/metrics", "/v1/models", "/v1/nope", CHAT]
)
async def test_head_is_what_get_would_say_without_its_body(serve: Any, path: str) -> None:
    served = await serve()
    status, headers, body = await answer_to(served, get(path, method="HEAD"))
    get_status, get_headers, _ = await answer_to(served, get(path))
    assert (status, headers.get("Content-Type"), body) == (get_status, get_headers.get("Content-Type"), b"")


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "TRACE", "DELETE", "PROPFIND"])
async def test_methods_that_a_route_does_not_have_are_405_and_tell_which_it_has(serve: Any, method: str) -> None:
    served = await serve()
    for path, allowed in ((CHAT, "POST"), ("/live", "GET, HEAD")):
        status, headers, body = await answer_to(served, get(path, method=method))
        assert (status, headers["Allow"], error_in(body)["code"]) == (405, allowed, "method_not_allowed")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://elsewhere/live", 200), ("/%6cive", 200), ("/live?a=%zz", 200), ("/live#x", 200), ("/v1/mode%6cs", 401),
        ("http://elsewhere/v1/models", 401), ("/%2Flive", 401), ("//live", 401), ("/live/", 401), ("/live/../v1/models", 401),
        ("/live%00", 401),
    ],
)  # fmt: skip
async def test_however_a_path_is_written_it_needs_the_key_of_its_route(serve: Any, target: str, status: int) -> None:
    served = await serve(api_key=("secret",))
    assert (await answer_to(served, get(target)))[0] == status


async def test_an_upgrade_that_is_not_taken_up_leaves_a_connection_that_works(serve: Any) -> None:
    served = await serve()
    upgrade = message("GET /live HTTP/1.1", *WEBSOCKET)
    status, headers, rest = await answer_to(served, upgrade + get("/version"))
    assert (status, headers["Content-Length"]) == (200, "0")
    assert rest.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "Authorization", "User-Agent", "Cookie", "Content-Type"])
async def test_bytes_that_are_no_text_hurt_in_no_header(serve: Any, name: str) -> None:
    served = await serve()
    head, _, _ = post().partition(b"\r\n\r\n")
    assert (await answer_to(served, head + f"\r\n{name}: ".encode() + b"\xff\xfe\r\n\r\n" + PAYLOAD))[0] == 200

"""A thousand broken and mad requests: each is refused or answered, none hurts the server or the next one."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

Serve = Callable[..., Any]
NUM_REQUESTS = 1000
CONCURRENCY = 16
DEADLINE_S = 90.0  # for one answer
PATIENCE_S = 0.3  # of a client with a broken request, which may be one that the server still waits for
ALLOWED_5XX = (503, 505)  # the latter for a request line whose version got lost
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
    "/v1/load_lora_adapter", "/scale_elastic_ep", "/admin/ranks/0/undrain",
)  # fmt: skip
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None}], "prompt": "one two three",
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "n": 1, "stop": ["x"], "logprobs": 1, "logit_bias": {"5": 1},
    "seed": 1, "stream": False, "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "tools": None,
    "input": "text", "tokens": [1, 2], "model": "tiny", "priority": 0, "structured_outputs": None,
    "chat_template_kwargs": {"a": 1}, "bad_words": ["x"], "stop_token_ids": [5],
    "min_tokens": 0, "prompt_logprobs": 1, "echo": False, "lora_name": "a",
    "instructions": "x", "text": {"format": {"type": "text"}}, "max_output_tokens": 3,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip
MAD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**200, 0.5, -0.0, 1e308, "", "x", "\x00", "\ud800", "é" * 300, "{{",
    "{% for %}", [], [[]], [None], ["\udfff"], [1, "a"], {}, {"": {}}, {"a": [{"b": {}}]}, [0] * 3000, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wrong", "pattern": "("}}}, {"regex": "(" * 40},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], [{"role": 5}],
    [{"content": "x"}],
)  # fmt: skip
JUNK = (
    b"", b"\x00", b"\r\n", b"\r\n\r\n", b"\xff\xfe", b"HTTP/1.1", b"Content-Length: -5\r\n", b"A" * 9000,
    b"Transfer-Encoding: x\r\n",
)  # fmt: skip


def mad_body(rng: random.Random) -> bytes:
    body = {name: BODY[name] for name in rng.sample(sorted(BODY), rng.randint(0, len(BODY)))}
    for _ in range(rng.randint(0, 3)):
        body[rng.choice([*BODY, "unknown"])] = rng.choice(MAD_VALUES)
    return json.dumps(body).encode()


def mad_request(rng: random.Random) -> tuple[bytes, float]:
    """Well-formed HTTP with a body of mad values, or one with something broken in its bytes; and what its client waits."""
    body = mad_body(rng)
    headers = rng.sample(
        [
            "X-data-parallel-rank: 9", "X-Request-Timeout-Ms: 0", "X-Session-Id: a b", "traceparent: 00-zz", "Expect: wonders",
            "endpoint-load-metrics-format: bin", "Authorization: Bearer x", "Content-Encoding: gzip", "X-Request-Id: \x7f",
        ],
        rng.randint(0, 2),
    )  # fmt: skip
    lines = [f"POST {rng.choice(PATHS)} HTTP/1.1", "Host: t", "Connection: close", f"Content-Length: {len(body)}", *headers]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    if rng.random() < 0.5:
        return request, DEADLINE_S
    position = rng.randrange(len(request))
    match rng.randrange(4):
        case 0:
            return request[:position], PATIENCE_S
        case 1:
            return request[:position] + rng.choice(JUNK) + request[position:], PATIENCE_S
        case 2:
            return request[:position] + bytes([rng.randrange(256)]) + request[position + 1 :], PATIENCE_S
        case _:
            return rng.randbytes(rng.randint(1, 300)), PATIENCE_S


async def status_of(host: str, port: int, request: bytes, patience_s: float) -> int | None:
    """None when there is no answer: the client has left, or the connection was closed."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        head = await asyncio.wait_for(reader.readline(), patience_s)
    except (ConnectionError, TimeoutError):
        assert patience_s < DEADLINE_S, request
        return None
    finally:
        writer.close()
    return int(head.split(b" ", 2)[1]) if head else None


async def test_no_broken_or_mad_request_kills_hangs_or_is_a_500(serve: Serve, simulated: list[str]) -> None:
    server = serve(*simulated, "-dp", "2")
    rng, gate = random.Random(0), asyncio.Semaphore(CONCURRENCY)
    parts = urlsplit(server.url)
    counts: dict[int | None, int] = {}

    async def send(request: bytes, patience_s: float) -> None:
        async with gate:
            status = await status_of(str(parts.hostname), int(parts.port or 0), request, patience_s)
        counts[status] = counts.get(status, 0) + 1
        assert status is None or status < 500 or status in ALLOWED_5XX, (status, request)

    await asyncio.gather(*(send(*mad_request(rng)) for _ in range(NUM_REQUESTS)))
    assert sum(counts.values()) == NUM_REQUESTS
    assert {200, 400, None} <= counts.keys(), counts
    assert server.get("/health").status_code == 200
    assert all(rank["state"] == "ready" and rank["deaths"] == 0 for rank in server.status()["ranks"])
    assert not any("Traceback" in line for line in server.stderr)

"""TLS on the listening socket, and certificates that cannot be used."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError, ServerConfig
from gateway.server.app import make_ssl_context

DEADLINE_S = 60.0


async def test_requests_are_served_over_tls_and_only_over_tls(serve: Any, certificate: dict[str, str]) -> None:
    served = await serve(**certificate)
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    url = f"https://127.0.0.1:{served.port}/v1/completions"
    async with served.http.post(url, json={"prompt": "a"}, ssl=context) as response:
        assert (await response.json())["choices"][0]["text"] == "Hello, big world"
    reader, _ = await served.raw(b"GET /live HTTP/1.1\r\nHost: t\r\n\r\n")
    assert b"200 OK" not in await reader.read()


@pytest.mark.parametrize("data", [b"GET /live HTTP/1.1\r\nHost: t\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\x00\x05hello"])
async def test_what_is_no_tls_is_hung_up_on_without_a_word_in_the_log(
    serve: Any, certificate: dict[str, str], caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    served = await serve(**certificate)
    with caplog.at_level(logging.INFO):
        reader, _ = await served.raw(data)
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert caplog.records == []


async def test_what_is_no_http_is_told_so_over_tls(serve: Any, certificate: dict[str, str]) -> None:
    served = await serve(**certificate)
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
    writer.write(b"garbage\r\n\r\n")
    assert b" 400 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), DEADLINE_S)
    assert b'"code":"malformed_request"' in await asyncio.wait_for(reader.readuntil(b"}}"), DEADLINE_S)
    writer.close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    for name in ("bad.pem", "missing.pem"):
        config = ServerConfig(ssl_certfile=str(tmp_path / name), ssl_keyfile=str(tmp_path / "key.pem"))
        with pytest.raises(ConfigError, match=name):
            make_ssl_context(config)
    assert make_ssl_context(ServerConfig()) is None

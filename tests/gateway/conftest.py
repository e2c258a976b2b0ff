"""A server on a real socket over a fake engine client."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from gateway.config import GatewayConfig, ServerConfig
from gateway.output_processor import OutputProcessor
from gateway.server import RunningServer, ServerState, run_server
from gateway.testing import FakeEngineClient, Script, says
from tests.gateway.output_harness import TOKENIZER

if TYPE_CHECKING:
    import openai

DEADLINE_S = 60.0
CERTIFICATE_COMMAND = (
    "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
    "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem",
)  # fmt: skip


@dataclass
class Served:
    """What a test sees of its server."""

    url: str
    engine: FakeEngineClient
    state: ServerState
    server: RunningServer
    http: aiohttp.ClientSession
    connections: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, aiohttp.ClientResponse]:
        """(status, decoded body, response)"""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response

    async def get(self, path: str, **headers: str) -> tuple[int, str, aiohttp.ClientResponse]:
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.text(), response

    async def events(self, path: str, body: Any, **headers: str) -> tuple[list[Any], aiohttp.ClientResponse]:
        """All events of a stream, decoded; `[DONE]` stays text."""
        async with self.http.post(self.url + path, json={**body, "stream": True}, headers=headers) as response:
            return parse_events(await response.read()), response

    def openai(self, api_key: str = "none") -> openai.AsyncOpenAI:
        """The official client, as a context manager."""
        import openai  # half a second, which the other tests need not pay

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S)

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own that has sent `data`; it is closed with the test at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.connections.append(writer)
        writer.write(data)
        await writer.drain()
        return reader, writer


def parse_events(data: bytes) -> list[Any]:
    events = data.decode().split("\n\n")
    assert events.pop() == "", "the last event has no end"
    assert all(event.startswith("data: ") for event in events)
    payloads = [event.removeprefix("data: ") for event in events]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def raw_post(path: str, body: Any, *headers: str) -> bytes:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(payload)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server; all of them end with the test."""
    started: list[Served] = []

    async def start(
        script: Script | None = None, *, ready: bool = True, max_body_bytes: int | None = None, **server_config: Any
    ) -> Served:
        config = GatewayConfig(server=ServerConfig(**server_config))
        engine = FakeEngineClient(script or says("Hello, big world"), config)
        state = ServerState(config, engine=engine if ready else None)
        if max_body_bytes is not None:
            state.max_body_bytes = max_body_bytes
        uds = config.server.uds
        listener = socket.socket(socket.AF_UNIX if uds else socket.AF_INET)
        listener.bind(uds or ("127.0.0.1", 0))
        url = f"unix:{uds}" if uds else f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = await run_server(state, listener)
        served = Served(url, engine, state, server, aiohttp.ClientSession())
        started.append(served)
        return served

    yield start
    for served in started:
        await served.http.close()
        for writer in served.connections:
            writer.close()
        await served.server.stop(1.0)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(CERTIFICATE_COMMAND, cwd=directory, check=True, capture_output=True, timeout=60)
    return {"ssl_certfile": str(directory / "cert.pem"), "ssl_keyfile": str(directory / "key.pem")}


@pytest.fixture
def processor() -> Iterator[OutputProcessor]:
    processor = OutputProcessor(TOKENIZER)
    yield processor
    processor.check_invariants()

"""Sends planned requests to an OpenAI-compatible endpoint and keeps the time of every chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from gateway.bench.workload import SAMPLE_TEXT, PlannedRequest
from gateway.endpoint_url import http_base, make_connector, reason

CONNECT_TIMEOUT_S = 30.0


class EndpointError(Exception):
    """The endpoint cannot be used at all: nothing was measured."""


@dataclass(slots=True)
class RequestResult:
    """What one request went through. Times in seconds of a monotonic clock."""

    start_s: float
    num_prompt_tokens: int
    chunk_times_s: list[float] = field(default_factory=list)  # of chunks with text
    end_s: float | None = None
    num_output_tokens: int = 0  # as the endpoint counts them
    rank: str | None = None
    error: str | None = None
    has_begun: bool = False  # something of the answer came


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class EventParser:
    """Pieces of a server-sent event stream to the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [event[6:] for event in events if event.startswith(b"data: ")]


class BenchClient:
    """One endpoint; use it as a context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, chat: bool = False, timeout_s: float = 300.0) -> None:
        self._url = url.rstrip("/")
        self._base = http_base(self._url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=timeout_s)
        self._chat = chat
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = make_connector(self._url, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def find_model(self, name: str | None = None) -> str:
        """`name`, or the endpoint's first. Raises `EndpointError`, also for one that the endpoint says generates no text."""
        document = await self._ask("GET", "/v1/models")
        try:
            tasks = {str(card["id"]): card.get("supported_tasks", ("generate",)) for card in document["data"]}
        except (KeyError, TypeError, AttributeError):
            tasks = {}
        if not tasks:
            raise EndpointError(f"{self._url}/v1/models lists no model")
        model = next(iter(tasks)) if name is None else name
        if model in tasks and "generate" not in tasks[model]:
            raise EndpointError(f"model {model!r} makes embeddings and generates no text: bench measures streams of text")
        return model

    async def token_pool(self, model: str) -> list[int]:
        """Ids of ordinary tokens to make prompts of. Raises `EndpointError`."""
        body = {"model": model, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
        document = await self._ask("POST", "/tokenize", body)
        pool = sorted(set(document.get("tokens", [])))
        if not pool:
            raise EndpointError(f"{self._url}/tokenize gave no tokens")
        return pool

    async def text_of(self, model: str, token_ids: Sequence[int]) -> str:
        """Raises `EndpointError`."""
        document = await self._ask("POST", "/detokenize", {"model": model, "tokens": list(token_ids)})
        return str(document["prompt"])

    async def body_of(self, model: str, planned: PlannedRequest, temperature: float) -> dict[str, Any]:
        """The body that asks for exactly the planned number of tokens. A chat template adds some to the prompt."""
        body = {
            "model": model,
            "max_tokens": planned.num_output_tokens,
            "ignore_eos": True,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            text = await self.text_of(model, planned.prompt_token_ids)
            return {**body, "messages": [{"role": "user", "content": text}]}
        return {**body, "prompt": list(planned.prompt_token_ids)}

    async def send(self, planned: PlannedRequest, body: dict[str, Any]) -> RequestResult:
        """Never raises for what the endpoint does: that is the result."""
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        result = RequestResult(time.monotonic(), len(planned.prompt_token_ids))
        try:
            try:
                await self._post(path, body, result)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if result.has_begun:
                    raise
                # A connection that was kept, and that the server ended just as we took it: after an error in a stream it does.
                await self._post(path, body, result)
        except TimeoutError:
            result.error = f"nothing came for {self._timeout.sock_read:g} s"
        except (aiohttp.ClientError, OSError) as error:
            result.error = "the stream broke off" if result.has_begun else reason(error, self._url)
        result.end_s = time.monotonic()
        return result

    async def _post(self, path: str, body: dict[str, Any], result: RequestResult) -> None:
        assert self._session is not None
        async with self._session.post(self._base + path, json=body) as response:
            result.has_begun = True
            result.rank = response.headers.get("X-Gateway-Rank")
            if response.status != 200:
                result.error = f"{response.status}: {await _error_message(response)}"
            else:
                result.error = await _read_stream(_pieces(response), result)

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        assert self._session is not None
        try:
            async with self._session.request(method, self._base + path, json=body) as response:
                if response.status != 200:
                    raise EndpointError(f"{self._url}{path} answered {response.status}: {await _error_message(response)}")
                return msgspec.json.decode(await response.read(), type=dict[str, Any])
        except TimeoutError:
            raise EndpointError(f"{self._url}{path} did not answer") from None
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise EndpointError(f"{self._url}{path}: {reason(error, self._url)}") from error


async def _error_message(response: aiohttp.ClientResponse) -> str:
    body = await response.read()
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except msgspec.MsgspecError:
        error = None
    return error.message if error is not None else body[:200].decode(errors="replace")


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in response.content.iter_any():
        yield piece


async def _read_stream(pieces: AsyncIterator[bytes], result: RequestResult) -> str | None:
    """Fills `result`; what went wrong, or None for a stream that ended as it should."""
    parser, error, is_done = EventParser(), None, False
    async for piece in pieces:
        now = time.monotonic()
        for payload in parser.feed(piece):
            if payload == b"[DONE]":
                is_done = True
                continue
            try:
                event = _decode_event(payload)
            except msgspec.MsgspecError as problem:
                return f"unreadable event: {problem}"
            if event.error is not None:
                error = f"in the stream: {event.error.message}"
            if event.usage is not None:
                result.num_output_tokens = event.usage.completion_tokens
            if any(choice.text or (choice.delta and choice.delta.content) for choice in event.choices):
                result.chunk_times_s.append(now)
    if error is None and not is_done:
        return "the stream ended without [DONE]"
    return error


async def run_load(
    client: BenchClient,
    model: str,
    planned: Sequence[PlannedRequest],
    on_result: Callable[[RequestResult], None],
    *,
    concurrency: int | None = None,
    temperature: float = 0.0,
) -> None:
    """All requests: `concurrency` at a time, or each at its own time however many are under way then."""
    # Made before the first one is sent: asking for texts between requests would be load that is not measured.
    bodies = [await client.body_of(model, request, temperature) for request in planned]
    work = list(zip(planned, bodies, strict=True))
    async with asyncio.TaskGroup() as tasks:
        if concurrency is not None:
            queue = iter(work)

            async def take_turns() -> None:
                for request, body in queue:
                    on_result(await client.send(request, body))

            for _ in range(min(concurrency, len(work))):
                tasks.create_task(take_turns())
            return

        async def send_one(request: PlannedRequest, body: dict[str, Any]) -> None:
            on_result(await client.send(request, body))

        start_s = time.monotonic()
        for request, body in work:
            delay_s = start_s + (request.at_s or 0.0) - time.monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.create_task(send_one(request, body))

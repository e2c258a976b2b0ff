"""An `EngineClient` without engines, for tests of what stands on top of it. It says what its script says, when it says so.

Shipped, so that users can test their own servers and clients of `EngineClient`. No sockets, no tasks, no clock.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from cores.messages import RankId
from cores.pooling_params import PoolingParams
from cores.sampling_params import RequestOutputKind, SamplingParams
from gateway.chat_messages import normalise_messages
from gateway.config import GatewayConfig
from gateway.engine_client import EngineClient, ModelConfig, Prompt, PromptPieces, TokenizedPrompt
from gateway.errors import EngineDeadError, GatewayError, InvalidRequestError, OverloadedError
from gateway.group_settings import GroupStore
from gateway.input_processor import InputProcessor
from gateway.logprobs import PromptLogprobs
from gateway.lora_store import LoraAdapter
from gateway.outputs import CompletionOutput, PoolingRequestOutput, PositionLogprobs, RequestOutput, RequestStats
from gateway.shared_value import OwnValue
from gateway.status import BalancerStatus, FrontEndStatus, RankStatus, StatusSnapshot, Totals

BOS_TOKEN_ID = 1
TOKEN_INTERVAL_S = 0.01  # of the fake time that `RequestStats` shows


class FakeTokenizer:
    """One token per character, whose id is its code point."""

    vocab_size = 0x110000

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [BOS_TOKEN_ID] * add_special_tokens + [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in token_ids if not (skip_special_tokens and i == BOS_TOKEN_ID))

    def max_chars(self, num_tokens: int) -> int:
        return num_tokens

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class FakeRenderer:
    """Messages as `<role>content`, one after the other."""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.rendered: list[dict[str, Any]] = []  # the arguments of each call

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.rendered.append({"messages": messages, **options})
        text = "".join(f"<{message['role']}>{message['content']}" for message in normalise_messages(list(messages)))
        return text + "<assistant>" * bool(options.get("add_generation_prompt", True))

    async def encode_async(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)


@dataclass(slots=True, eq=False)
class FakeRequest:
    """One request, from both sides: tests and scripts `put` and `fail`, the engine client's user reads `outputs`."""

    request_id: str
    prompt_token_ids: list[int]
    prompt_text: str | None
    params: SamplingParams
    options: dict[str, Any]  # the other arguments of `generate`
    rank: int | None = 0
    merges_unread: bool = False  # as a collector does; otherwise each piece is an output of its own
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # shown with every output
    is_finished: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # its reader is gone, for whatever reason
    _unread: deque[CompletionOutput] = field(default_factory=deque)
    _unfinished: set[int] = field(default_factory=set)
    _error: GatewayError | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _num_tokens: int = 0

    def __post_init__(self) -> None:
        self._unfinished = set(range(self.params.n))

    def put(
        self,
        text: str,
        index: int = 0,
        *,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        logprobs: list[PositionLogprobs] | None = None,
    ) -> None:
        """The next piece of one sequence; each character is a token."""
        token_ids = [ord(char) for char in text]
        self._num_tokens += len(token_ids)
        if finish_reason is not None:
            self._unfinished.remove(index)
        self._unread.append(CompletionOutput(index, text, token_ids, logprobs, finish_reason, stop_reason))
        self._wake.set()

    def fail(self, error: GatewayError) -> None:
        """Raised to the reader once it has read what is there."""
        self._error = error
        self._wake.set()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            while not self.is_finished:
                while not self._has_output():
                    if self._error is not None:
                        raise self._error
                    self._wake.clear()
                    await self._wake.wait()
                output = self._take()
                self.is_finished = output.finished
                yield output
        finally:
            self.ended.set()

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def _has_output(self) -> bool:
        if self.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return not self._unfinished
        return bool(self._unread)

    def _take(self) -> RequestOutput:
        if self.merges_unread or self.params.output_kind is RequestOutputKind.FINAL_ONLY:
            pieces = list(self._unread)
            self._unread.clear()
        else:
            pieces = [self._unread.popleft()]
        merged: dict[int, CompletionOutput] = {}
        for piece in pieces:
            merged[piece.index] = _merge(merged[piece.index], piece) if piece.index in merged else piece
        stats = RequestStats(
            arrival_s=0.0,
            first_token_s=TOKEN_INTERVAL_S,
            last_token_s=TOKEN_INTERVAL_S * max(1, self._num_tokens),
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=self._num_tokens,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt_text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[merged[index] for index in sorted(merged)],
            finished=not self._unfinished and not self._unread,
            stats=stats,
            rank=self.rank,
            prompt_logprobs=self.prompt_logprobs,
        )


def _merge(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if old.logprobs is None and new.logprobs is None else [*(old.logprobs or ()), *(new.logprobs or ())]
    return replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)


Script = Callable[[FakeRequest], None]


def says(text: str, *, rank: int = 0) -> Script:
    """Every sequence says `text`, a word at a time, until its end or `max_tokens`."""

    def script(request: FakeRequest) -> None:
        request.rank = rank
        limit = request.params.max_tokens
        shown = text if limit is None else text[:limit]
        reason = "stop" if shown == text and (limit is None or len(text) < limit) else "length"
        words = [word for word in shown.replace(" ", "\0 ").split("\0") if word]
        for i, word in enumerate(words):
            for index in range(request.params.n):
                request.put(word, index, finish_reason=reason if i == len(words) - 1 else None)

    return script


def waits(_request: FakeRequest) -> None:
    """Says nothing: the test does."""


class FakeLoras:
    """Adapters of an endpoint without engines: any path will do."""

    def __init__(self) -> None:
        self.error: GatewayError | None = None  # what `add` raises
        self.pinned: list[str] = []
        self._by_name: dict[str, LoraAdapter] = {}

    def adapters(self) -> list[LoraAdapter]:
        return list(self._by_name.values())

    def find(self, name: str) -> LoraAdapter | None:
        return self._by_name.get(name)

    async def add(self, name: str, path: str, *, load_inplace: bool = False) -> LoraAdapter:
        if self.error is not None:
            raise self.error
        if name in self._by_name and not load_inplace:
            raise InvalidRequestError(f"the LoRA adapter {name!r} has already been loaded", "lora_name")
        self._by_name[name] = LoraAdapter(name=name, path=path, id=path)
        return self._by_name[name]

    async def remove(self, name: str) -> None:
        if self._by_name.pop(name, None) is None:
            raise InvalidRequestError(f"the LoRA adapter {name!r} cannot be found", "lora_name", status=404)

    async def pin(self, name: str) -> None:
        self.pinned.append(name)


class FakeEngineClient(EngineClient):
    """`requests` holds every request in order of its first iteration; `aborted` the ids of those that lost their reader."""

    def __init__(self, script: Script | None = None, config: GatewayConfig | None = None) -> None:
        self.config = config or GatewayConfig()
        self.model_config = ModelConfig("fake", "/models/fake", 1000, FakeTokenizer.vocab_size, (2,), 1_700_000_000)
        self.fake_renderer = FakeRenderer()
        self.renderer = cast(Any, self.fake_renderer)
        self.input_processor = InputProcessor(self.model_config, self.renderer, random.Random(0))
        self.script = script or says("Hello, world")
        self.loras: FakeLoras = FakeLoras()
        self.requests: list[FakeRequest] = []
        self.aborted: list[str] = []
        self.overload: OverloadedError | None = None  # what `check_admission` and `generate` raise
        self.num_preparing = 0  # sequences whose prompts are being made ready
        self.death: EngineDeadError | None = None
        self.group: GroupStore = OwnValue()
        self.utility_calls: list[tuple[Any, ...]] = []  # (method, arguments …)
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.order_error: GatewayError | None = None
        self.utility_results: dict[str, Any] = {}  # of every rank, by method; an error is raised
        self.state = "ready"
        self.ranks: tuple[RankStatus, ...] = (RankStatus(rank=0, epoch=1, state="ready", node="here", pid=1, device="cpu"),)
        self._request_came = asyncio.Condition()

    async def next_request(self, number: int = 0) -> FakeRequest:
        """The request of that number, as soon as it is there."""
        async with self._request_came:
            await self._request_came.wait_for(lambda: len(self.requests) > number)
        return self.requests[number]

    @property
    def is_running(self) -> bool:
        return self.death is None and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self.state == "dead"

    @property
    def errored(self) -> bool:
        return self.death is not None

    @property
    def dead_error(self) -> EngineDeadError:
        assert self.death is not None
        return self.death

    def status(self) -> StatusSnapshot:
        in_flight = sum(not request.ended.is_set() for request in self.requests)
        return StatusSnapshot(
            version="0",
            mode=type(self).__name__,
            model=self.model_config.name,
            uptime_s=1.0,
            state="dead" if self.errored else self.state,
            front_ends=(FrontEndStatus(index=0, pid=1, in_flight=in_flight),),
            ranks=self.ranks,
            totals=Totals(requests=len(self.requests), aborted=len(self.aborted)),
            balancer=BalancerStatus(policy="none", dispatch="early"),
        )

    async def generate(
        self, prompt: Prompt | PromptPieces, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        assert not isinstance(prompt, AsyncIterator), "the fake answers whole prompts only"
        self.check_admission(sampling_params.n)
        assert not isinstance(prompt, TokenizedPrompt), "the fake knows text and ids"
        text = prompt if isinstance(prompt, str) else options.get("prompt_text")
        ids = self.fake_renderer.tokenizer.encode(prompt, True) if isinstance(prompt, str) else list(prompt)
        request = FakeRequest(request_id, ids, text, sampling_params, options)
        async with self._request_came:
            self.requests.append(request)
            self._request_came.notify_all()
        self.script(request)
        outputs = request.outputs()
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()
            if not request.is_finished and request._error is None:
                self.aborted.append(request_id)

    def embeds(self, size: int, dimensions: tuple[int, ...] = ()) -> None:
        """From now on it is an embedding model; a vector's numbers are the prompt's length and those after it."""
        self.model_config = replace(
            self.model_config, supported_tasks=("embed",), embedding_size=size, embedding_dimensions=dimensions
        )
        self.input_processor = InputProcessor(self.model_config, self.renderer, random.Random(0))

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        self.check_admission()
        self.model_config.check_task("embed")
        processed = await self.input_processor.process_pooling(prompt, pooling_params)
        length = len(processed.prompt_token_ids)
        numbers = array("f", range(length, length + (pooling_params.dimensions or self.model_config.embedding_size)))
        yield PoolingRequestOutput(request_id, processed.prompt_token_ids, numbers.tobytes(), RequestStats(0.0), 0)

    async def abort(self, request_id: str) -> None:
        await self.cancel(request_id)

    async def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        found = False
        for request in self.requests:
            is_mine = request.request_id == request_id and tenant in (None, request.options.get("tenant"))
            if is_mine and not request.ended.is_set() and request._unfinished:
                found = True
                for index in sorted(request._unfinished):
                    request.put("", index, finish_reason="abort")
        return found

    async def abort_queued(self) -> None:
        """Nothing waits here."""

    def check_admission(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    @contextmanager
    def preparing(self, num_sequences: int = 1) -> Iterator[None]:
        self.check_admission(num_sequences)
        self.num_preparing += num_sequences
        try:
            yield
        finally:
            self.num_preparing -= num_sequences

    def refusal(self, num_sequences: int = 1, num_tokens: int = 0) -> BaseException | None:
        return self.death or self.overload

    async def check_health(self) -> None:
        if self.death is not None:
            raise self.death

    async def call_utility_by_rank(self, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        self.utility_calls.append((method, *args))
        result = self.utility_results.get(method)
        if isinstance(result, GatewayError):
            raise result
        return {rank.rank: result for rank in self.ranks}

    async def tell_ranks(
        self,
        method: str,
        *args: Any,
        rank_ids: Sequence[RankId] | None = None,
        timeout_s: float | None = None,
        insist: bool = False,
    ) -> int:
        return len(await self.call_utility_by_rank(method, *args, timeout_s=timeout_s))

    async def order(self, action: str, **options: Any) -> None:
        self.orders.append((action, options))
        if self.order_error is not None:
            raise self.order_error

    def start_draining(self) -> None:
        self.state = "draining"
        self.overload = OverloadedError("the server is shutting down")

    async def wait_until_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                for request in self.requests:
                    await request.ended.wait()
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        self.state = "dead"
        for request in self.requests:
            if not request.ended.is_set():
                request.fail(EngineDeadError("the engine client was shut down"))

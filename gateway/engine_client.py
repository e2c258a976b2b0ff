"""All that the HTTP layer may call. `AsyncLLM` is its one implementation."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cores.messages import EngineReady
from cores.pooling_params import PoolingParams
from cores.sampling_params import OPTIONAL_FEATURES, SamplingParams
from gateway.errors import EngineDeadError, InvalidRequestError
from gateway.operations import Operations
from gateway.outputs import PoolingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from gateway.config import GatewayConfig
    from gateway.input_processor import InputProcessor
    from gateway.lora_store import LoraAdapter
    from gateway.renderer import Renderer
    from gateway.status import StatusSnapshot


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as a renderer made it."""

    token_ids: Sequence[int]
    text: str | None  # None: it came as token ids


Prompt = str | Sequence[int] | TokenizedPrompt  # text, token ids, or both
PromptPieces = AsyncIterator[Prompt]  # a session, whose later pieces go on the same sequence: see `input_session`


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the front end knows of the model, from its directory and from the ranks' ready messages."""

    name: str  # the first served name
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int  # Unix time, for /v1/models
    features: tuple[str, ...] = OPTIONAL_FEATURES  # what all ranks have of them
    num_kv_tokens: int | None = None  # what the smallest KV cache holds; `max_model_len` is not above it
    supported_tasks: tuple[str, ...] = ("generate",)  # or "embed"
    embedding_size: int = 0
    embedding_dimensions: tuple[int, ...] = ()  # smaller sizes that vectors may be cut to
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # where a request does not say: of `SamplingParams`

    @property
    def context_length(self) -> str:
        """In words, for those who ask for more."""
        why = " (all that the KV cache holds)" if self.max_model_len == self.num_kv_tokens else ""
        return f"{self.max_model_len} tokens{why}"

    def check_task(self, task: str) -> None:
        """Raises `InvalidRequestError` that says what the model is for instead."""
        if task in self.supported_tasks:
            return
        if task == "embed":
            raise InvalidRequestError(f"model {self.name!r} generates text and makes no embeddings", "model")
        raise InvalidRequestError(f"model {self.name!r} makes embeddings (/v1/embeddings) and generates no text", "model")

    @classmethod
    def of(cls, config: GatewayConfig, ranks: Sequence[EngineReady], sampling_defaults: Mapping[str, Any]) -> ModelConfig:
        """What all ranks can do: the least of each."""
        path = config.engine.model
        return cls(
            name=(config.server.served_model_name or (os.path.basename(path.rstrip("/")),))[0],
            path=path,
            max_model_len=min(ready.max_model_len for ready in ranks),
            vocab_size=min(ready.vocab_size for ready in ranks),
            eos_token_ids=ranks[0].eos_token_ids,
            created=int(time.time()),
            num_kv_tokens=min(ready.num_kv_blocks * ready.block_size for ready in ranks),
            features=tuple(f for f in OPTIONAL_FEATURES if all(f in ready.features for ready in ranks)),
            supported_tasks=ranks[0].supported_tasks,
            embedding_size=ranks[0].embedding_size,
            embedding_dimensions=ranks[0].embedding_dimensions,
            sampling_defaults=sampling_defaults,
        )


class Loras(Protocol):
    """The adapters of an endpoint: `LoraManager`, or a test's fake."""

    def adapters(self) -> list[LoraAdapter]: ...

    def find(self, name: str) -> LoraAdapter | None: ...

    async def add(self, name: str, path: str, *, load_inplace: bool = False) -> LoraAdapter: ...

    async def remove(self, name: str) -> None: ...

    async def pin(self, name: str) -> None: ...


class EngineClient(Operations):
    """The engine behind one endpoint, whatever its ranks are doing. Methods may be called from one event loop only."""

    config: GatewayConfig
    model_config: ModelConfig
    renderer: Renderer
    input_processor: InputProcessor
    loras: Loras

    # --- state ---

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Started, not shut down, not dead."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Shut down in order."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """No rank is left and none will come back, or the output handler has ended: every new request fails at once."""

    @property
    @abstractmethod
    def dead_error(self) -> EngineDeadError:
        """Why `errored`. Defined only then."""

    @property
    def should_keep_api_server_alive(self) -> bool:
        """Whether the watchdog leaves the server running although the engine is dead."""
        return False

    @abstractmethod
    def status(self) -> StatusSnapshot:
        """A consistent picture for `/status`, `/metrics`, `/health` and `/ready`."""

    # --- requests ---

    @abstractmethod
    def generate(
        self,
        prompt: Prompt | PromptPieces,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        kv_hints: Mapping[str, Any] | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one request; the last one is `finished`, and there is always exactly one such end or an error.

        Nothing happens until the generator is iterated. Closing it aborts the request. `request_id` is the caller's name for
        it, echoed and accepted by `abort`; two requests may share one. Pieces of a prompt are answered one after the other, on
        one rank; an output with a finish reason ends its piece.

        * `lora_request`: the name of an adapter.
        * `tokenization_kwargs`: for a prompt that is text; `add_special_tokens` (True) is the one there is.
        * `trace_headers`: W3C trace context of the caller; dropped, with one warning, where no traces endpoint is configured.
        * `priority`: lower is sooner, with `--scheduling-policy priority`.
        * `data_parallel_rank`: this rank and no other; `session_id`: what requests of one conversation have in common;
          `tenant`: whose it is, where tenants get equal shares (`--dispatch-order fair`).
        * `timeout_s`: a request that has a sequence without a token by then ends.
        * `prompt_text`: what `prompt` ids were made from. `cache_salt`: only requests with the same share prefixes.
        * `kv_hints`, `reasoning_ended`, `reasoning_parser_kwargs`: taken and without effect yet, which the log says once.

        Raises `InvalidRequestError` before any token, `OverloadedError` when there is no room, `EngineGenerateError` when this
        request fails, `EngineDeadError` when its rank dies and it cannot go on, `DeadlineExceededError` when its time is over.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends all requests of that (external or internal) id: their readers get a last output with finish reason "abort".
        Unknown and finished ids are no-ops."""

    @abstractmethod
    async def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """`abort` for a client: those of its tenant only (None: whoever's). False where no front end has one under way.

        Raises `OverloadedError` when a front end that may have it does not answer.
        """

    @abstractmethod
    def check_admission(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """Raises `OverloadedError` when a request of that size would be refused, `EngineDeadError` when errored."""

    @abstractmethod
    def preparing(self, num_sequences: int = 1) -> AbstractContextManager[None]:
        """What `check_admission` does, and holds the places while a request's prompts are rendered and tokenized. Without it a
        burst would pass the check together, and be refused when all the work is done. `generate` takes its places itself."""

    @abstractmethod
    def refusal(self, num_sequences: int = 1, num_tokens: int = 0) -> BaseException | None:
        """What `check_admission` would raise, for probes: asking counts no rejection."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raises `EngineDeadError` when no rank can serve."""

    @abstractmethod
    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        prompt_text: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """One vector of one prompt, from an embedding model: its one output, or an error. All else as with `generate`."""

    # --- operations: the rare ones are in `Operations` ---

    async def add_lora(self, name: str, path: str, *, load_inplace: bool = False) -> LoraAdapter:
        """Serves the adapter in a directory as the model `name`, on every rank or on none; a rank that starts again has it
        before it takes requests. `load_inplace` also replaces one of that name, which requests under way keep.

        Raises `InvalidRequestError` that names the rank and what is wrong with the adapter, 404 when it is not there.
        """
        return await self.loras.add(name, path, load_inplace=load_inplace)

    async def remove_lora(self, name: str) -> None:
        """Refuses new requests for it; those under way go on. Raises `InvalidRequestError` (404) when there is none."""
        await self.loras.remove(name)

    async def pin_lora(self, name: str) -> None:
        """Keeps it resident on every rank from its next use on."""
        await self.loras.pin(name)

    async def list_loras(self) -> list[LoraAdapter]:
        return self.loras.adapters()

    def find_lora(self, name: str) -> LoraAdapter | None:
        """The adapter that is served as the model `name`."""
        return self.loras.find(name)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.model_config.supported_tasks

    async def is_tracing_enabled(self) -> bool:
        return False

    @abstractmethod
    def start_draining(self) -> None:
        """New requests are refused with `OverloadedError`; those in flight go on."""

    @abstractmethod
    async def wait_until_idle(self, timeout_s: float) -> bool:
        """True once nothing is in flight, False when the time is over first."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Aborts what is left, stops the output handler and closes the core client. Idempotent, bounded."""

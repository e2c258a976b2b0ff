"""What the scheduler hands to a model runner for one step, and what it gets back. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cores.config import DEFAULT_BLOCK_SIZE
from cores.messages import PromptLogprobsChunk, TokenLogprobs
from cores.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_tokens` of the request's `token_ids` from `request.num_computed_tokens` on are computed in this step.

    The request's `block_ids` already cover them. `samples` says that the chunk reaches the end of `token_ids`, so that its last
    position yields the next token.
    """

    request: Request
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's batch: decodes (one token, prompt done) first, then prefill chunks."""

    scheduled: list[ScheduledRequest]
    num_decodes: int  # so many of `scheduled`, from the start, are decodes
    num_tokens: int


@dataclass(slots=True)
class ModelRunnerOutput:
    """`token_ids[i]` is the token of the i-th request that samples, in `scheduled` order."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by the same index, where asked for
    vectors: dict[int, bytes] = field(default_factory=dict)  # by the same index, of those that pool; their token is void
    errors: dict[int, str] = field(default_factory=dict)  # by the same index: this request alone failed; its token is void
    # The same index again. No token was chosen yet: the last position is to be computed again, in the next step.
    deferred: frozenset[int] = frozenset()
    completed: set[int] = field(default_factory=set)  # nothing can follow this token: the request ends with it
    # By index in `scheduled`: of the prompt tokens whose predecessors this step computed, while `needs_prompt_logprobs`.
    prompt_logprobs: dict[int, PromptLogprobsChunk] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model turned out to be."""

    device: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int
    block_size: int = DEFAULT_BLOCK_SIZE
    features: tuple[str, ...] = ()  # of `sampling_params.OPTIONAL_FEATURES`
    supported_tasks: tuple[str, ...] = ("generate",)  # or "embed": what requests may ask for
    needs_whole_prompts: bool = False  # in one step; `max_model_len` is then within the step's token budget
    embedding_size: int = 0
    embedding_dimensions: tuple[int, ...] = ()  # smaller sizes that vectors may be cut to
    no_sleep: str = ""  # why it cannot give its memory back and wake up again; empty: it can


class RunnerOperations(Protocol):
    """What is done to a loaded model between two steps. The public methods of an implementation can be called by name
    (`collective_rpc`)."""

    def load_lora(self, path: str) -> str:
        """Reads an adapter into host memory and returns its id, the same on every rank. One that is there is not kept twice.

        Raises `LoraError` that says what is wrong with it. Requests of a batch name adapters by this id.
        """
        ...

    def drop_lora(self, lora_id: str) -> None:
        """Forgets it. No batch will name it."""
        ...

    def pin_loras(self, lora_ids: frozenset[str]) -> None:
        """These, and only these, keep their slot once they have one. A batch never needs more than the slots beside them."""
        ...

    def sleep(self, level: int) -> None:
        """Gives up the KV cache's memory, and the weights': level 1 keeps them on the host, level 2 not at all. What sleeps
        already goes on sleeping."""
        ...

    def wake_up(self, tags: Collection[str]) -> None:
        """Brings back "weights" and "kv_cache", the latter without its content. What is awake already stays as it is."""
        ...

    def prepare_weights(self, directory: str) -> None:
        """Reads other weights for the same model into the host's memory. Raises `ConfigError` that names what does not fit."""
        ...

    def commit_weights(self) -> None:
        """Puts the prepared weights in place of the present ones, which cannot fail."""
        ...

    def discard_weights(self) -> None:
        """Forgets the prepared weights, if any."""
        ...

    def start_profile(self) -> None: ...

    def stop_profile(self, stem: Path) -> Path:
        """Writes what was seen to a file of that name, with the suffix of its kind, and returns its path."""
        ...

    def shutdown(self) -> None: ...


class ModelRunner(RunnerOperations, Protocol):
    """Computes one step. The torch runner and the simulated one both pass `tests/cores/runner_contract.py`."""

    def load(self) -> ModelInfo:
        """Loads weights and allocates the KV cache. Raises `ConfigError` with the numbers when something does not fit."""
        ...

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        """Runs the batch. An exception here is the engine's death: errors of one request go into `errors`.

        In each layer the K and V of the whole batch are written before any are read: a request may begin behind blocks that
        another one of the same batch fills.
        """
        ...

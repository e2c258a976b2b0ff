"""What `generate()` and `encode()` yield."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import OverloadedError

if TYPE_CHECKING:
    from gateway.logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    text: str  # of this token alone; bytes that are no whole character are in `bytes_`
    bytes_: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token, and the most likely ones in order of rank (the chosen one is among them only if it is that likely)."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` sequences. Text and ids are in step: no id is shown whose text is still held back."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS
    vector: bytes | None = None  # of a pooling request, which has nothing else: float32, little-endian

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStats:
    """Of the whole request, filled as it goes; times on the front end's monotonic clock, in seconds."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    queued_s: float = 0.0  # inside the engine
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0  # all sequences
    num_moves: int = 0  # how often a sequence went on at another rank
    weight_version: int = 0  # of the weights that chose its first token, in the end its last


@dataclass(slots=True)
class RequestOutput:
    """One item of a stream: a delta, the text so far, or the end, by `SamplingParams.output_kind`."""

    request_id: str  # the caller's
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # the sequences that have something new, by index
    finished: bool  # of all sequences: the last item of its stream
    stats: RequestStats
    rank: int | None = None  # the first rank that served it
    prompt_logprobs: PromptLogprobs | None = None  # where they were asked for, in every output from the first token on


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """What `encode()` yields, once."""

    request_id: str  # the caller's
    prompt_token_ids: list[int]
    vector: bytes  # float32, little-endian
    stats: RequestStats
    rank: int | None = None
    finished: bool = True

    @property
    def values(self) -> list[float]:
        numbers = array("f")
        numbers.frombytes(self.vector)
        return numbers.tolist()


def to_pooling_output(output: RequestOutput) -> PoolingRequestOutput:
    """The end of a pooling request. Raises `OverloadedError` if it was aborted: by a pause, after which it may come again."""
    (completion,) = output.outputs
    if completion.vector is None:
        raise OverloadedError(f"the request was ended before its vector was computed ({completion.finish_reason})")
    return PoolingRequestOutput(output.request_id, output.prompt_token_ids, completion.vector, output.stats, output.rank)

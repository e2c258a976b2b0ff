"""What front ends and engine cores say to each other, and to the coordinator: frozen values. `codec` turns them into bytes.
`control_messages` has what goes to and from the launcher.

Rules
-----
* A wire type only grows at its end, with a default; anything else bumps `codec.PROTOCOL_VERSION`.
* A request is known on the wire by its handle, a small integer that a front end never uses twice. The long ids are for people.
* Every command of a front end to a rank carries a sequence number, counted per (front end, rank epoch) from 1. Every report
  of the rank says the highest one that it already contains, so that no report can erase a newer dispatch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from cores.pooling_params import PoolingParams
from cores.sampling_params import SamplingParams


class RankId(NamedTuple):
    """One life of a rank. A restarted rank has the next epoch; frames of an older one are dropped."""

    rank: int
    epoch: int

    def __str__(self) -> str:
        return f"rank {self.rank} (epoch {self.epoch})"

    @property
    def identity(self) -> bytes:
        """Its name at a ROUTER: what is meant for one life cannot reach its successor."""
        return b"rank-%d-%d" % self


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REJECTED = 4  # the engine takes no requests at the moment; `Finished.error` says why

    @property
    def text(self) -> str:
        return self.name.lower()


class EngineState(StrEnum):
    """What an engine says of itself while it lives."""

    READY = "ready"
    DRAINING = "draining"  # takes no requests; those that it has come to their ends
    PAUSED = "paused"  # makes no steps
    SLEEPING = "sleeping"  # makes no steps, and some of its memory is given back


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank has to do, as of one step. Tokens, not requests, are what a rank is slow or fast at."""

    num_waiting: int = 0  # requests with no token computed yet, preempted ones included
    num_running: int = 0
    num_prefill_tokens: int = 0  # prompt tokens of all its requests still to be computed; not those that the cache has
    num_decodes: int = 0  # running sequences whose prompt is done
    num_kv_blocks_used: int = 0  # held by requests; cached blocks that nobody holds count as free
    num_kv_blocks: int = 0
    step_ms: float = 0.0  # EWMA of the time of one step
    prefill_tokens_per_s: float = 0.0  # what each prompt token adds to a step, as a rate; EWMA, 0.0 until measured
    decode_tokens_per_s: float = 0.0  # of steps without prompt tokens, all their sequences together; EWMA

    @property
    def kv_cache_usage(self) -> float:
        return self.num_kv_blocks_used / self.num_kv_blocks if self.num_kv_blocks else 0.0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the rank's start, in tokens where not said otherwise."""

    num_steps: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0  # computed or taken from the cache
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


# --- front end → engine core ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One sequence to generate. The engine knows no text: stop strings are the front end's."""

    handle: int
    request_id: str  # for logs only
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams  # `seed` and `max_tokens` are always set
    arrival_time_s: float  # Unix time
    # Where the original prompt ended. A request that continues elsewhere has the tokens already delivered behind it: positions
    # of the noise, penalties, min_tokens and logprobs count from here. `sampling_params.max_tokens` counts from here too.
    num_original_prompt_tokens: int
    priority: int = 0  # lower first
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_id: str | None = None  # which adapter was meant by that name when the request came; None: whichever has it now
    pooling_params: PoolingParams | None = None  # set: one vector is wanted of the prompt and no token


@dataclass(frozen=True, slots=True)
class AddRequest:
    seq: int
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class AbortRequests:
    seq: int
    handles: tuple[int, ...]  # unknown or finished handles are no-ops


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A rare operation, by the name of an `EngineCore` method marked as a utility."""

    seq: int
    call_id: int
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchCache:
    """From now on send `CacheEvents`, beginning with a snapshot. Once more: begin again."""

    seq: int


Command = AddRequest | AbortRequests | UtilityCall | WatchCache

# --- engine core → front end (`EngineReady` and `EngineCoreDead` also → launcher) --------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """First message of a rank's life to each front end and to the launcher."""

    rank_id: RankId
    pid: int
    node: str
    device: str  # "cpu", "cuda:0 NVIDIA H200"
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    supported_tasks: tuple[str, ...] = ("generate",)
    features: tuple[str, ...] = ()  # of `sampling_params.OPTIONAL_FEATURES`: what a request may ask of this engine
    embedding_size: int = 0  # of a model that embeds
    embedding_dimensions: tuple[int, ...] = ()  # smaller sizes that its vectors may be cut to


class FirstToken(NamedTuple):
    """Sent once per request, with its first token."""

    num_cached_tokens: int
    queued_s: float  # from the engine's receipt to the first step that computed some of it


class Finished(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None = None  # set when `reason` is STOP
    error: str | None = None  # set when `reason` is ERROR or REJECTED: what went wrong with this request alone


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one generated token and its most likely alternatives, by rank from 1."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobsChunk:
    """Log-probabilities of a run of prompt tokens, in columns: a prompt has a thousand times as many as a step generates."""

    start: int  # position in the prompt of the first token here; the prompt's own first token has none
    num_top: int  # alternatives per token
    logprobs: array[float]  # float32
    ranks: array[int]  # uint32
    top_token_ids: array[int]  # uint32, `num_top` for each token, by rank from 1
    top_logprobs: array[float]  # float32, the same


@dataclass(slots=True, kw_only=True)
class EngineCoreOutputs:
    """What one step gave one front end, in columns: row i is request `handles[i]` with `counts[i]` new tokens.

    One message per step and front end. Columns are packed arrays because a row object per token is what front ends spend
    their time on. Sparse extras are keyed by row.
    """

    rank_id: RankId
    step: int
    command_seq: int  # highest command of this front end that the step had seen
    load: RankLoad
    handles: array[int]  # uint32
    token_ids: array[int]  # uint32, rows one after the other
    counts: array[int] | None = None  # uint32; None: one token in every row
    first_tokens: dict[int, FirstToken] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    weight_version: int = 0
    prompt_logprobs: dict[int, PromptLogprobsChunk] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)  # float32, little-endian; such a row has no tokens and ends


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Every `HEARTBEAT_INTERVAL_S` from a thread that needs no step, and at once when the state changes."""

    rank_id: RankId
    step: int
    has_work: bool  # it should be making steps: not while it stands still or an operation (new weights, say) takes its time
    command_seq: int
    load: RankLoad
    stats: SchedulerStats
    state: EngineState = EngineState.READY
    weight_version: int = 0
    load_age_s: float = 0.0  # since the load was so: a step takes its time. 0 while there is nothing to do


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load on a timer, for a front end that gets no outputs at the moment."""

    rank_id: RankId
    step: int
    command_seq: int
    load: RankLoad
    load_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Which landmarks have come into a rank's prefix cache and which have left it, for a front end that watches (`WatchCache`).

    Sent before the outputs of the same step. One that came and left in between is among those that left.
    """

    rank_id: RankId
    seq: int  # counted by 1 per front end: a gap means that the reader must watch anew
    is_snapshot: bool  # `stored` is all that there is, whatever was said before
    stored: array[int]  # uint64: `BlockKey`s, in no order
    evicted: array[int]  # uint64


@dataclass(frozen=True, slots=True)
class EngineCoreDead:
    """A rank's last words. Proof of death, sent after its last outputs."""

    rank_id: RankId
    cause: str  # one line, then the traceback if there is one; empty: an orderly end


@dataclass(frozen=True, slots=True)
class UtilityResult:
    rank_id: RankId
    call_id: int
    value: Any = None
    error: str | None = None
    is_refusal: bool = False  # the caller asked for what cannot be: nothing broke


# --- the coordinator --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberReport:
    """An endpoint or front end tells the coordinator how its ranks are."""

    member: str  # unique per process life
    url: str
    ranks: tuple[tuple[RankId, str, RankLoad], ...]  # id, state, load
    group_size: int = 0  # `--data-parallel-size` as it was told; 0: not said


@dataclass(frozen=True, slots=True)
class MemberLeft:
    member: str


@dataclass(frozen=True, slots=True)
class GroupLoads:
    """What the coordinator knows of the whole group: the age of each row tells how much it is worth."""

    seq: int
    ranks: tuple[tuple[RankId, str, RankLoad, str, float], ...]  # id, state, load, url, age_s


HEARTBEAT_INTERVAL_S = 0.5
LOAD_REPORT_INTERVAL_S = 0.05  # when the load has changed

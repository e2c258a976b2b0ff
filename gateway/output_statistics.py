"""What statistics are told of requests and tokens. Knows nobody who keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.request_state import RankStay, RequestStream


@dataclass(slots=True)
class OutputCounters:
    """Since the start. A request counts once, however many sequences it has, when it ends."""

    finished_stop: int = 0  # by the reason of its last sequence
    finished_length: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # counted at the first token
    generation_tokens: int = 0
    stray_outputs: int = 0  # rows for handles that had ended already

    @property
    def finished(self) -> int:
        return self.finished_stop + self.finished_length

    def on_end(self, finish_reason: str) -> None:
        match finish_reason:
            case "stop":
                self.finished_stop += 1
            case "length":
                self.finished_length += 1
            case "abort":
                self.aborted += 1
            case _:
                self.failed += 1


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What statistics want to know of a request that has ended. Times are the caller's clock, in seconds."""

    external_id: str
    internal_id: str
    finish_reason: str  # "stop", "length", "abort", "error"
    rank: int | None
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None
    queued_s: float
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    num_moves: int
    trace_headers: Mapping[str, str] | None = None
    stays: tuple[RankStay, ...] = ()  # at ranks, where traces are made
    max_tokens: int | None = None  # that each sequence might have had
    num_longest_tokens: int = 0  # of the longest sequence

    @classmethod
    def of(cls, stream: RequestStream, finish_reason: str) -> FinishedRequest:
        stats = stream.stats
        return cls(
            external_id=stream.external_id,
            internal_id=stream.internal_id,
            finish_reason=finish_reason,
            rank=stream.rank,
            arrival_s=stats.arrival_s,
            first_token_s=stats.first_token_s,
            last_token_s=stats.last_token_s,
            queued_s=stats.queued_s,
            num_sequences=1 if stream.parent is None else stream.parent.n,
            num_prompt_tokens=len(stream.prompt_token_ids),
            num_cached_tokens=stats.num_cached_tokens,
            num_generation_tokens=stats.num_generation_tokens,
            num_moves=stats.num_moves,
            trace_headers=stream.trace_headers,
            stays=tuple(stream.stays),
            max_tokens=stream.params.max_tokens,
            num_longest_tokens=stream.longest,
        )


@dataclass(slots=True)
class TokenTimes:
    """The times of one slice, for histograms. Collected only while somebody asks for them."""

    rank: int
    num_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)  # one per request
    inter_token_s: list[float] = field(default_factory=list)  # one per row that was not its sequence's first

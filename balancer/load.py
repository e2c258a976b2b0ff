"""What a decision is made from: the request to place, and each rank as this front end knows it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from cores.messages import RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may know of a request. `num_prompt_tokens` is what has to be computed: without the expected cache hit."""

    num_prompt_tokens: int
    pinned_rank: int | None = None  # the caller chose (`X-data-parallel-rank`); no policy is asked
    session_id: str | None = None
    priority: int = 0  # lower first
    lora_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank: its last report, plus our commands that it does not contain, minus our aborts that it does not contain."""

    rank_id: RankId
    num_waiting: int
    num_running: int
    num_prefill_tokens: int  # prompt tokens still to be computed
    num_decodes: int
    kv_cache_usage: float  # 0 to 1, as reported
    step_ms: float  # 0.0 until measured
    prefill_tokens_per_s: float  # 0.0 until measured
    max_num_batched_tokens: int
    max_num_seqs: int
    own_in_flight: int  # this front end's live requests there: exact, however old the report is
    report_age_s: float | None  # None: no report yet, and the rest is our own bookings alone

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

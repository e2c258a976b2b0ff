"""What a decision is made from: the request to place, and each rank as this front end knows it. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cores.block_hash import BlockKey
from cores.messages import RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may know of a request."""

    num_prompt_tokens: int  # all of them, cached or not
    pinned_rank: int | None = None  # the caller chose (`X-data-parallel-rank`); no policy is asked
    session_id: str | None = None
    priority: int = 0  # lower first
    lora_name: str | None = None
    block_keys: Sequence[BlockKey] = ()  # landmarks of what a cache may spare it; none where nobody asks
    tokens_per_key: int = 0  # from one to the next
    # Prompt tokens that a rank is expected to have cached; ranks without any are left out. The balancer's note for the policy,
    # written anew each time: a copy of the request would cost as much as the choice.
    cached_tokens: dict[RankId, int] = field(default_factory=dict, compare=False)

    def keys_after(self, num_cached_tokens: int) -> Sequence[BlockKey]:
        """What a rank will add to its cache for it, that has so many of its tokens there."""
        return self.block_keys[num_cached_tokens // self.tokens_per_key :] if num_cached_tokens else self.block_keys


@dataclass(slots=True)
class RankView:
    """One rank: its last report, plus our commands that it does not contain, minus our aborts that it does not contain.

    Nobody changes one. It is not frozen because every decision makes two or three anew: a frozen one takes five times as long.
    """

    rank_id: RankId
    num_waiting: int
    num_running: int
    num_prefill_tokens: int  # prompt tokens still to be computed
    # What of this no report contains: our own last requests, and their prompt tokens.
    num_unreported: int
    num_unreported_tokens: int
    num_decodes: int
    kv_cache_usage: float  # 0 to 1, as reported
    step_ms: float  # 0.0 until measured
    prefill_tokens_per_s: float  # 0.0 until measured
    decode_tokens_per_s: float  # 0.0 until measured
    max_num_batched_tokens: int
    max_num_seqs: int
    own_in_flight: int  # this front end's live requests there: exact, however old the report is
    report_age_s: float | None  # None: no report yet, and the rest is our own bookings alone

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

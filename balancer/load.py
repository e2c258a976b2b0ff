"""What a decision is made from: the request to place, and each rank as this front end knows it. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cores.block_hash import BlockKey
from cores.messages import RankId


@dataclass(slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may know of a request. Nobody changes one but the balancer, and that only `cached_tokens`."""

    num_prompt_tokens: int  # all of them, cached or not
    pinned_rank: int | None = None  # the caller chose (`X-data-parallel-rank`); no policy is asked
    session_id: str | None = None
    tenant: str | None = None  # whose it is, where tenants are to get equal shares
    priority: int = 0  # lower first
    lora_name: str | None = None
    block_keys: Sequence[BlockKey] = ()  # landmarks of what a cache may spare it; none where nobody asks
    tokens_per_key: int = 0  # from one to the next
    # Prompt tokens that a rank is expected to have cached; ranks without any are left out. The balancer's note for the policy
    # and for whoever books, written anew with each choice: a copy of the request would cost as much as the choice.
    cached_tokens: dict[RankId, int] = field(default_factory=dict, compare=False)

    def new_on(self, rank_id: RankId) -> tuple[int, Sequence[BlockKey]]:
        """How many prompt tokens that rank will have to compute for it, and what it will add to its cache by that."""
        num_cached = self.cached_tokens.get(rank_id, 0)
        if not num_cached:
            return self.num_prompt_tokens, self.block_keys
        return self.num_prompt_tokens - num_cached, self.block_keys[num_cached // self.tokens_per_key :]


SEQUENCE_TOKENS = 32  # in a simulation of four traces 16 to 64 were alike; 1 cost latency per token, 256 cost first tokens
KV_FREE = 0.8


@dataclass(slots=True)
class RankView:
    """One rank: its last report, plus our commands that it does not contain, minus our aborts that it does not contain.

    The ledger's own, which it changes with all it books and hears: look at it, neither change nor keep it. To make new ones for
    every decision would take longer than to decide.
    """

    rank_id: RankId
    max_num_batched_tokens: int
    max_num_seqs: int
    num_waiting: int = 0
    num_running: int = 0
    num_prefill_tokens: int = 0  # prompt tokens still to be computed
    # What of this no report contains: our own last requests, and their prompt tokens.
    num_unreported: int = 0
    num_unreported_tokens: int = 0
    num_decodes: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1, as reported
    step_ms: float = 0.0  # 0.0 until measured
    prefill_tokens_per_s: float = 0.0  # 0.0 until measured
    decode_tokens_per_s: float = 0.0  # 0.0 until measured
    own_in_flight: int = 0  # this front end's live requests there: exact, however old the report is
    reported_at: float | None = None  # None: no report yet, and the rest is our own bookings alone
    load_tokens: int = 0  # all of it as one number: `in_tokens` of the rest

    def in_tokens(self) -> int:
        """What a new request finds before it there (`policies/least_tokens.py` says why these)."""
        tokens = self.num_prefill_tokens + SEQUENCE_TOKENS * (self.num_waiting + self.num_running)
        if self.kv_cache_usage <= KV_FREE:
            return tokens
        fullness = min(1.0, (self.kv_cache_usage - KV_FREE) / (1.0 - KV_FREE))
        return tokens + round(self.max_num_batched_tokens * fullness * fullness)

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

"""Builders for the values that a policy sees. What is left out is that of an idle rank with a fresh report."""

from __future__ import annotations

from typing import Any

from balancer.load import RankView, RoutingRequest
from cores.messages import RankId


def make_view(rank: int = 0, *, epoch: int = 1, **fields: Any) -> RankView:
    defaults: dict[str, Any] = {
        "num_waiting": 0,
        "num_running": 0,
        "num_prefill_tokens": 0,
        "num_unreported": 0,
        "num_unreported_tokens": 0,
        "num_decodes": 0,
        "kv_cache_usage": 0.0,
        "step_ms": 0.0,
        "prefill_tokens_per_s": 0.0,
        "decode_tokens_per_s": 0.0,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "own_in_flight": 0,
        "report_age_s": 0.0,
    }
    return RankView(rank_id=RankId(rank, epoch), **(defaults | fields))


def make_request(num_prompt_tokens: int = 100, **fields: Any) -> RoutingRequest:
    return RoutingRequest(num_prompt_tokens=num_prompt_tokens, **fields)

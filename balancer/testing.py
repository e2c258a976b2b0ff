"""Builders for the values that a policy sees. What is left out is that of an idle rank with a report of time 0."""

from __future__ import annotations

from typing import Any

from balancer.load import RankView, RoutingRequest
from cores.messages import RankId


def make_view(rank: int = 0, *, epoch: int = 1, **fields: Any) -> RankView:
    defaults: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "reported_at": 0.0}
    view = RankView(rank_id=RankId(rank, epoch), **(defaults | fields))
    view.load_tokens = view.in_tokens()
    return view


def make_request(num_prompt_tokens: int = 100, **fields: Any) -> RoutingRequest:
    return RoutingRequest(num_prompt_tokens=num_prompt_tokens, **fields)

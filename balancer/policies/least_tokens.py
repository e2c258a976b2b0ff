"""The rank that will give the first token soonest, as far as its queued work tells.

Theory of operation
-------------------
A rank computes a step of at most `max_num_batched_tokens` tokens at a time, in order of arrival. Before a new request's first
token it has to compute the prompt tokens queued before it and the request's own: that is the cost, in tokens. Three things
are put into the same unit:

* **Sequences.** Each request there, decoding or about to, takes its part of every step for as long as it runs. The newcomer
  shares its whole life with them, not only the wait for its first token, so one counts as `SEQUENCE_TOKENS`.
* **KV cache.** Near the end of the cache a prompt waits for blocks, or takes them from others. From `KV_FREE` on this rises
  to one full step's tokens at a full cache.
* **Speed.** A slow rank's tokens count more, by its measured prefill rate beside the group's best. That rate is of prompt
  tokens alone (`cores.step_times`), so it does not rise with how full a rank's steps are and cannot feed on itself. It is noisy
  all the same: up to `RATE_NOISE` it counts for nothing, and equal ranks tie exactly and take turns. A rank whose rate is not
  known is taken for a good one.

When the report behind the winner is old, everybody who holds it would herd to the same rank. Then the better of two random
ranks by our own requests, which we know exactly, takes its place.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice, Rotation, sample_two

RATE_NOISE = 1.5  # the best rate over a rank's own, up to which it says nothing about the rank
MAX_SLOWNESS = 10.0
MAX_REPORT_AGE_S = 1.5  # three heartbeats missed


class LeastTokens:
    name: ClassVar[str] = "least_tokens"

    def __init__(self, rng: random.Random) -> None:
        self._choice = LeastCost(rng)

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        num_tokens = request.num_prompt_tokens
        tokens = [view.load_tokens + num_tokens for view in ranks]
        return self._choice.choose(tokens, ranks, now, self.name)


class LeastCost:
    """The rank of the least cost, unless what is known of it is old."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rotation = Rotation(rng)

    def choose(self, tokens: Sequence[float], ranks: Sequence[RankView], now: float, reason: str) -> Choice:
        """`tokens` that each rank has to compute before a first token."""
        winner = ranks[self._rotation.pick_least(at_speed(tokens, ranks))]
        if winner.reported_at is not None and now - winner.reported_at > MAX_REPORT_AGE_S:
            return self._choose_by_own(ranks)
        return Choice(winner.rank_id, reason)

    def _choose_by_own(self, ranks: Sequence[RankView]) -> Choice:
        first, second = (ranks[index] for index in sample_two(self._rng, len(ranks)))
        better = second if second.own_in_flight < first.own_in_flight else first
        return Choice(better.rank_id, "old_report")


def at_speed(tokens: Sequence[float], ranks: Sequence[RankView]) -> Sequence[float]:
    """What each rank has to do, in tokens at the speed of the group's best rank. Nothing changes where no rank is slow."""
    worst = best = ranks[0].prefill_tokens_per_s
    for view in ranks:  # half the time of a list with its min and max
        rate = view.prefill_tokens_per_s
        if rate > best:
            best = rate
        elif rate < worst:
            worst = rate
    if worst * RATE_NOISE >= best:
        return tokens
    return [number * _slowness(view.prefill_tokens_per_s, best) for number, view in zip(tokens, ranks, strict=True)]


def _slowness(rate: float, best: float) -> float:
    return min(MAX_SLOWNESS, best / rate) if 0.0 < rate * RATE_NOISE < best else 1.0

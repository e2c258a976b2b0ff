"""Which rank gets a request: the caller's, if pinned, else the policy's. Knows no health: the caller says who is eligible."""

from __future__ import annotations

from collections.abc import Collection

from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.policy import Choice, Policy
from cores.messages import RankId


class NoRankAvailableError(Exception):
    """No rank can take the request at the moment. Try again later."""


class UnknownRankError(ValueError):
    """The request is pinned to a rank that does not exist. The caller's mistake."""


class LoadBalancer:
    def __init__(self, policy: Policy, ledger: LoadLedger) -> None:
        self.policy = policy
        self.ledger = ledger

    def choose(self, request: RoutingRequest, eligible: Collection[RankId], now: float) -> Choice:
        """Chooses and books nothing: the caller books at once, with no await between.

        Raises `UnknownRankError` or `NoRankAvailableError`.
        """
        index = self.ledger.prefix_index
        if index is not None and request.block_keys:
            request.cached_tokens = index.longest_prefixes(request.block_keys, request.tokens_per_key)
        if request.pinned_rank is not None:
            return self._choose_pinned(request.pinned_rank, eligible)
        if not eligible:
            raise NoRankAvailableError("no rank is ready")
        return self.policy.choose(request, self.ledger.views(eligible), now)

    def _choose_pinned(self, pinned_rank: int, eligible: Collection[RankId]) -> Choice:
        for rank_id in eligible:
            if rank_id.rank == pinned_rank:
                return Choice(rank_id, "pinned")
        existing = self.ledger.rank_numbers
        if existing and pinned_rank not in existing:
            raise UnknownRankError(f"rank {pinned_rank} does not exist; the ranks here are {_ranges(existing)}")
        raise NoRankAvailableError(f"rank {pinned_rank} is not ready")


def _ranges(numbers: Collection[int]) -> str:
    """`0 to 3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in runs)

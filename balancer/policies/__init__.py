"""The policies by name. A new one is a file here, a test beside the others, a row in README.md and a line below."""

from __future__ import annotations

import random

from balancer.policies.least_requests import LeastRequests
from balancer.policies.least_tokens import LeastTokens
from balancer.policies.power_of_two import PowerOfTwo
from balancer.policies.prefix_affinity import PrefixAffinity
from balancer.policies.random_rank import RandomRank
from balancer.policies.round_robin import RoundRobin
from balancer.policies.session_affinity import SessionAffinity
from balancer.policies.vllm import Vllm
from balancer.policy import Policy
from balancer.prefix_index import PrefixIndex

_CLASSES: tuple[type[Policy], ...] = (
    LeastTokens, PrefixAffinity, SessionAffinity, LeastRequests, PowerOfTwo, RoundRobin, RandomRank, Vllm,
)  # fmt: skip

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _CLASSES}
_WITH_PREFIXES = frozenset({PrefixAffinity.name})


def make_policy(name: str, rng: random.Random, num_front_ends: int = 1) -> Policy:
    """For one of so many front ends of the same ranks."""
    if name not in POLICIES:
        raise ValueError(f"unknown load balancing policy {name!r}; one of {', '.join(POLICIES)}")
    if name == Vllm.name:
        return Vllm(rng, num_front_ends)
    return POLICIES[name](rng)


def make_prefix_index(policy: str) -> PrefixIndex | None:
    """What a ledger needs so that this policy sees what is cached where; None: it does not look at that."""
    return PrefixIndex() if policy in _WITH_PREFIXES else None

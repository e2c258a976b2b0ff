"""What can be put to the test, by name: every policy of the balancer with its own ledger, and what others do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from balancer.ledger import LoadLedger
from balancer.load_balancer import LoadBalancer
from balancer.policies import POLICIES, make_policy, make_prefix_index
from balancer.policies.vllm import Vllm
from balancer.simulation.baselines import SglangCacheAware, SnapshotLedger
from balancer.simulation.front_end import Reporting
from balancer.simulation.oracle import Oracle
from balancer.simulation.rank import SimulatedRank
from balancer.simulation.simulator import MakeBalancer
from cores.messages import RankId

Ranks = dict[RankId, SimulatedRank]


def _as_asked(reporting: Reporting) -> Reporting:
    return reporting


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    make_balancer: MakeBalancer
    reporting: Callable[[Reporting], Reporting] = _as_asked  # how its signals differ from ours


def make_contender(name: str) -> Contender:
    """Raises `ValueError`, with the names that there are."""
    if name in _BASELINES:
        return _BASELINES[name]
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; one of {', '.join(contender_names())}")

    return Contender(name, partial(_make_ours, name))


def contender_names() -> list[str]:
    return sorted({*POLICIES, *_BASELINES})


def _make_ours(name: str, rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(make_policy(name, rng, num_front_ends), LoadLedger(make_prefix_index(name)))


def _make_vllm(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(Vllm(rng, num_front_ends), SnapshotLedger(bump=num_front_ends))


def _make_sglang(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(SglangCacheAware(rng), LoadLedger())


def _make_oracle(rng: random.Random, num_front_ends: int, ranks: Ranks) -> LoadBalancer:
    return LoadBalancer(Oracle(rng, ranks), LoadLedger())


def _every_100_ms(reporting: Reporting) -> Reporting:
    return replace(reporting, load_interval_s=0.1)


_BASELINES = {
    "vllm": Contender("vllm", _make_vllm, _every_100_ms),
    "sglang": Contender("sglang", _make_sglang),
    "oracle": Contender("oracle", _make_oracle),
}

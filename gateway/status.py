"""The status document (`GET /status`) as values: one consistent picture of the endpoint. Field names and units are public."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndStatus:
    index: int
    pid: int
    in_flight: int = 0
    queued: int = 0
    event_loop_lag_ms: float = 0.0
    age_s: float = 0.0  # of this row: another front end's last word may be old


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeCounters:
    """What happened in one life of a rank. Every front end that is there sees the same, more or less of it."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    stalls: int = 0
    deaths: int = 0  # 1 if it has ended, and not by an operator's order

    def join(self, other: LifeCounters) -> LifeCounters:
        """What two front ends have seen of the same life, or one of them earlier and later."""
        return LifeCounters(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)})


def _sum_of(lives: Iterable[LifeCounters]) -> LifeCounters:
    known = list(lives)
    return LifeCounters(**{f.name: sum(getattr(life, f.name) for life in known) for f in dataclasses.fields(LifeCounters)})


# By then every front end has heard, and told, all that there is to a life.
NUM_LIVES_KEPT = 16


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of one rank: the latest by epoch, all before them as one sum.

    Front ends see more or less of each life, so what they know of it is joined before lives are added: later it cannot be. So
    only what all front ends know together is folded. The sum of whoever has folded most then counts instead of what others
    still have of those lives: it is in there.
    """

    by_epoch: dict[int, LifeCounters] = field(default_factory=dict)
    folded_to: int = -1  # the last epoch that is in `folded`
    folded: LifeCounters = LifeCounters()

    def join(self, other: Lives) -> Lives:
        to = max(self.folded_to, other.folded_to)
        folded = LifeCounters()
        for lives in (self, other):
            folded = folded.join(lives.folded) if lives.folded_to == to else folded
        epochs = {e for e in (*self.by_epoch, *other.by_epoch) if e > to}
        none = LifeCounters()
        return Lives({e: self.by_epoch.get(e, none).join(other.by_epoch.get(e, none)) for e in epochs}, to, folded)

    @property
    def is_long(self) -> bool:
        return len(self.by_epoch) > NUM_LIVES_KEPT

    def fold(self) -> Lives:
        """Only for what all front ends know together."""
        early = sorted(self.by_epoch)[:-NUM_LIVES_KEPT]
        if not early:
            return self
        folded = _sum_of([self.folded, *(self.by_epoch[epoch] for epoch in early)])
        return Lives({e: life for e, life in self.by_epoch.items() if e > early[-1]}, early[-1], folded)

    @property
    def totals(self) -> dict[str, Any]:
        """By the names that a rank's status has for them, too."""
        total = _sum_of([self.folded, *self.by_epoch.values()])
        return {f.name: getattr(total, f.name) for f in dataclasses.fields(LifeCounters)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    rank: int
    epoch: int
    state: str  # "starting", "ready", "suspect", "stalled", "draining", "paused", "sleeping", "dead", "restarting"
    node: str = ""
    pid: int | None = None
    device: str = ""
    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_hit_rate: float = 0.0
    queued_tokens: int = 0  # prompt tokens still to be computed
    prompt_tokens_per_s: float = 0.0
    generation_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    # Its speed as measured by its steps, which the balancer goes by; 0 until there is something to tell.
    prefill_speed_tokens_per_s: float = 0.0
    decode_speed_tokens_per_s: float = 0.0
    last_seen_s: float | None = None  # since any message of the rank
    signal_age_ms: float | None = None  # since its load was as last reported
    ledger_tokens: int = 0  # what this front end has booked on it
    ledger_requests: int = 0  # the same in sequences
    restarts: int = 0
    requests_total: int = 0
    requests_moved_away: int = 0
    requests_moved_in: int = 0
    last_death_s_ago: float | None = None
    death_cause: str | None = None
    weight_version: int = 0  # as given by the last update of its weights
    # Counters over all lives of the rank: they never go back, or Prometheus would see a reset at every restart.
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    stalls: int = 0
    deaths: int = 0
    lives: Lives = Lives()  # these counters by life; not in the document
    max_num_seqs: int = 0  # that can run at a time; 0: not known yet
    num_kv_blocks: int = 0
    block_size: int = 0  # tokens in each of them
    restart_pending: bool = False  # dead, but another life is coming
    start_progress: float | None = None  # while it starts: how much of its weights is loaded, from 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    requests: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0
    moved: int = 0
    expired: int = 0  # of `failed`: no token by their deadlines
    prompt_tokens: int = 0
    generation_tokens: int = 0
    malformed_frames: int = 0  # of ranks, dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    seq: int  # the same at every read and from every front end; later events have larger ones
    age_s: float
    kind: str  # "death", "move", "restart", "drain", "stall", "scale", "ready"
    rank: int | None
    text: str
    epoch: int | None = None  # of the rank's life that it belongs to, if it does


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerStatus:
    policy: str
    dispatch: str
    signal_age_ms: float | None = None  # of the oldest load in use
    prefix_landmarks: int = 0  # of cached prefixes that are known here, over all ranks; one stands for some 64 tokens


@dataclass(frozen=True, slots=True)
class LoraStatus:
    """One LoRA adapter; counts are sequences."""

    name: str
    waiting: int = 0  # for their first token
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    version: str
    mode: str  # the core client's class
    model: str
    uptime_s: float
    state: str  # "ready", "starting", "degraded", "draining", "paused", "sleeping", "dead"
    front_ends: tuple[FrontEndStatus, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    totals: Totals = Totals()
    balancer: BalancerStatus | None = None
    events: tuple[Event, ...] = ()
    max_loras: int = 0  # different adapters in one step of a rank; 0: LoRA is not enabled
    loras: tuple[LoraStatus, ...] = ()
    group: tuple[dict[str, Any], ...] = ()  # external LB: what the coordinator says of the other endpoints' ranks

    def to_document(self) -> dict[str, Any]:
        """JSON-able, with the public names."""
        document = dataclasses.asdict(self)
        for rank in document["ranks"]:
            del rank["lives"]
        return document

    @property
    def num_healthy_ranks(self) -> int:
        """They serve, or would if an operator had not told them to stand still."""
        return sum(rank.state in ("ready", "suspect", "draining", "paused", "sleeping") for rank in self.ranks)

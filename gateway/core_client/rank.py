"""What a core client remembers of one rank, over all its lives. Knows no sockets and no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from balancer.rank_health import RankHealth, RankState
from cores.messages import EngineReady, RankId, RankLoad, SchedulerStats
from gateway.core_client.commands_seen import CommandsSeen
from gateway.status import LifeCounters, Lives, RankStatus

MIN_RATE_INTERVAL_S = 0.4  # a heartbeat comes every 0.5 s, more or less

MAX_RATE_AGE_S = 2.0


@dataclass(slots=True)
class RateMeter:
    """Growth per second of a counter, between the last two readings that were far enough apart to say."""

    value: int = 0
    at_s: float | None = None
    per_s: float = 0.0

    def read(self, value: int, now: float) -> None:
        if self.at_s is None or value < self.value:  # the first reading, or a new life
            self.value, self.at_s, self.per_s = value, now, 0.0
        elif now - self.at_s >= MIN_RATE_INTERVAL_S:
            self.per_s = (value - self.value) / (now - self.at_s)
            self.value, self.at_s = value, now

    def rate(self, now: float) -> float:
        """0 when nothing has been said for a while: a rank that is silent is not as fast as it was."""
        return self.per_s if self.at_s is not None and now - self.at_s <= MAX_RATE_AGE_S else 0.0


@dataclass(slots=True)
class RankLife:
    """One epoch of a rank."""

    rank_id: RankId
    health: RankHealth
    ready: EngineReady | None = None
    pid: int | None = None  # as the launcher says, before the engine itself has
    start_progress: float = 0.0  # how much of its weights it has loaded, from 0 to 1
    last_seq: int = 0  # of the commands sent to it
    num_drain_orders: int = 0  # as the launcher has told
    unreachable_s: float | None = None  # since when it can be sent none
    is_up: bool = False  # the launcher has heard that it is ready
    is_leaving: bool = False  # it ends by an operator's order
    is_node_lost: bool = False  # it died with its node
    has_told_idle: bool = False  # it drains, and the launcher knows that we have nothing on it
    load: RankLoad = field(default_factory=RankLoad)
    load_at_s: float | None = None  # when it was so, at the engine
    weight_version: int = 0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    num_stalls: int = 0
    has_died: bool = False  # and not by an operator's order
    missing_loras: dict[str, str] = field(default_factory=dict)  # adapters that it should have and could not load: why, by name

    @property
    def counters(self) -> LifeCounters:
        stats = self.stats
        return LifeCounters(
            prompt_tokens=stats.num_prompt_tokens,
            generation_tokens=stats.num_generation_tokens,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            preemptions=stats.num_preemptions,
            stalls=self.num_stalls,
            deaths=int(self.has_died),
        )

    commands_seen: CommandsSeen = field(init=False)

    def __post_init__(self) -> None:
        self.commands_seen = CommandsSeen(self.last_seq)

    @property
    def is_eligible(self) -> bool:
        return self.health.is_eligible and self.unreachable_s is None

    @property
    def condition(self) -> str:
        """For people."""
        state = self.health.state
        is_lost = self.unreachable_s is not None and state is not RankState.DEAD
        return "cannot be reached" if is_lost else f"is {state.value}"


@dataclass(slots=True)
class Rank:
    """A rank number of this endpoint. Counters go on over restarts."""

    life: RankLife
    restarts: int = 0
    restart_pending: bool = False  # dead, but another life is coming
    requests_total: int = 0
    requests_moved_away: int = 0
    requests_moved_in: int = 0
    death_cause: str | None = None
    last_death_s: float | None = None
    past: Lives = field(default_factory=Lives)
    prompt_rate: RateMeter = field(default_factory=RateMeter)
    generation_rate: RateMeter = field(default_factory=RateMeter)

    def begin_life(self, life: RankLife, known_lives: Callable[[int], Lives]) -> None:
        """`known_lives`: what other front ends know of a rank's lives. It is asked seldom."""
        self.past = self.lives
        if self.past.is_long:
            self.past = self.past.join(known_lives(life.rank_id.rank)).fold()
        self.life = life

    def on_stats(self, stats: SchedulerStats, now: float) -> None:
        self.life.stats = stats
        self.prompt_rate.read(stats.num_prompt_tokens, now)
        self.generation_rate.read(stats.num_generation_tokens, now)

    def on_death(self, cause: str, now: float) -> None:
        if not self.life.is_leaving:
            self.life.has_died = True
            self.death_cause, self.last_death_s = cause, now
        self.prompt_rate, self.generation_rate = RateMeter(), RateMeter()

    @property
    def lives(self) -> Lives:
        """As far as this front end has seen them."""
        return self.past.join(Lives({self.life.rank_id.epoch: self.life.counters}))

    def status(self, now: float, ledger_tokens: int, ledger_requests: int = 0) -> RankStatus:
        life, stats, lives = self.life, self.life.stats, self.lives
        alive = self.life.health.is_serving
        load = life.load if alive else RankLoad()
        return RankStatus(
            rank=life.rank_id.rank,
            epoch=life.rank_id.epoch,
            state=life.health.state.value,
            node=life.ready.node if life.ready else "",
            pid=life.ready.pid if life.ready else life.pid,
            device=life.ready.device if life.ready else "",
            waiting=load.num_waiting,
            running=load.num_running,
            kv_cache_usage=round(load.kv_cache_usage, 4),
            prefix_cache_hit_rate=round(stats.prefix_cache_hits / max(1, stats.prefix_cache_queries), 4),
            queued_tokens=load.num_prefill_tokens,
            prompt_tokens_per_s=round(self.prompt_rate.rate(now), 1),
            generation_tokens_per_s=round(self.generation_rate.rate(now), 1),
            step_ms=round(load.step_ms, 3),
            prefill_speed_tokens_per_s=round(load.prefill_tokens_per_s, 1),
            decode_speed_tokens_per_s=round(load.decode_tokens_per_s, 1),
            last_seen_s=None if life.ready is None else round(life.health.last_seen_s(now), 3),
            signal_age_ms=None if life.load_at_s is None or not alive else round(1000 * (now - life.load_at_s), 1),
            ledger_tokens=ledger_tokens,
            ledger_requests=ledger_requests,
            restarts=self.restarts,
            requests_total=self.requests_total,
            requests_moved_away=self.requests_moved_away,
            requests_moved_in=self.requests_moved_in,
            last_death_s_ago=None if self.last_death_s is None else round(now - self.last_death_s, 3),
            death_cause=self.death_cause,
            weight_version=life.weight_version,
            **lives.totals,
            lives=lives,
            max_num_seqs=life.ready.max_num_seqs if life.ready else 0,
            num_kv_blocks=life.ready.num_kv_blocks if life.ready else 0,
            block_size=life.ready.block_size if life.ready else 0,
            restart_pending=self.restart_pending,
            start_progress=None if life.ready else life.start_progress,
        )

"""Replays a trace through front ends and ranks in virtual time. Equal arguments give equal results.

Only what happens from outside is an event here: arrivals, departures, faults. Ranks are advanced to each event's time and
compute all their steps up to there, so that time passes without a queue of steps.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from balancer.dispatch_queue import DispatchOrder, DispatchQueue
from balancer.load_balancer import LoadBalancer, NoRankAvailableError
from balancer.simulation.front_end import Reporting, SimulatedFrontEnd
from balancer.simulation.rank import NEVER, RankConfig, SimulatedRank, StepLog
from balancer.simulation.request import SimulatedRequest, make_block_hashes
from balancer.simulation.trace import HASH_ID_TOKENS, TraceRequest
from cores.messages import RankId

END_OF_TIME = sys.float_info.max
MAX_PATIENCE_S = 20.0  # a client that leaves does so within this time of its arrival
DRAIN_POLL_S = 0.1


class MakeBalancer(Protocol):
    """A front end's balancer. `ranks` is for baselines that know the true state; it changes with deaths and restarts."""

    def __call__(self, rng: random.Random, num_front_ends: int, ranks: dict[RankId, SimulatedRank]) -> LoadBalancer: ...


@dataclass(frozen=True, slots=True)
class Death:
    rank: int
    at_s: float
    restart_after_s: float | None = None  # None: it stays away


@dataclass(frozen=True, slots=True)
class Slowdown:
    rank: int
    at_s: float
    factor: float  # 1.0 ends an earlier one


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """Each rank in turn takes no new requests, is stopped when it is empty or its time is up, and comes back."""

    at_s: float
    drain_s: float = 30.0
    restart_after_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    num_ranks: int
    rank: RankConfig
    num_front_ends: int = 1
    reporting: Reporting = field(default_factory=Reporting)
    dispatch: Literal["early", "late"] = "early"
    dispatch_order: DispatchOrder = "fcfs"
    detection_s: float = 0.05  # from a death to the front ends' knowing of it; measured 17 to 64 ms
    deaths: Sequence[Death] = ()
    slowdowns: Sequence[Slowdown] = ()
    rolling_restart: RollingRestart | None = None
    failover: bool = True  # requests of a dead rank go on at another one; else they end with it
    max_num_queued_requests: int | None = None  # per front end, of all that it has in flight: above it new ones are refused
    max_num_queued_tokens: int | None = None  # likewise, of prompt tokens still to be computed
    disconnect_rate: float = 0.0  # share of the clients that leave, at a random token


@dataclass(slots=True)
class SimulationResult:
    """What happened, for a report. `logs` are by rank, over all its lives."""

    requests: list[SimulatedRequest]
    logs: list[StepLog]


Action = Callable[[float], None]


class Simulation:
    def __init__(self, config: SimulationConfig, trace: Sequence[TraceRequest], make_balancer: MakeBalancer, seed: int) -> None:
        self.config = config
        rng = random.Random(seed)
        self._ranks: dict[RankId, SimulatedRank] = {}
        self._eligible: list[RankId] = []
        self._logs = [StepLog() for _ in range(config.num_ranks)]
        self._epochs = [0] * config.num_ranks
        self._slowness = [1.0] * config.num_ranks
        self.front_ends = [
            self._make_front_end(index, make_balancer(random.Random(rng.random()), config.num_front_ends, self._ranks))
            for index in range(config.num_front_ends)
        ]
        self._wakes_s = [END_OF_TIME] * config.num_front_ends  # when each next looks whether there is room
        self._requests = self._make_requests(trace)
        self._unplaced: list[SimulatedRequest] = []  # came when no rank was eligible
        self._events: list[tuple[float, int, Action]] = []
        self._num_events = 0
        for rank in range(config.num_ranks):
            self._start_rank(rank, 0.0)
        self._plan(rng)

    def _make_front_end(self, index: int, balancer: LoadBalancer) -> SimulatedFrontEnd:
        config, queue = self.config, None
        if config.dispatch == "late":
            queue = DispatchQueue(balancer, config.dispatch_order, config.num_front_ends)
        return SimulatedFrontEnd(index, balancer, config.reporting, queue)

    def _make_requests(self, trace: Sequence[TraceRequest]) -> list[SimulatedRequest]:
        size, num_front_ends = self.config.rank.block_size, self.config.num_front_ends
        has_cache = self.config.rank.enable_prefix_caching
        requests = []
        for handle, row in enumerate(trace):
            hashes = make_block_hashes(row, handle, size, HASH_ID_TOKENS) if has_cache else []
            requests.append(SimulatedRequest(handle, handle % num_front_ends, row, hashes, row.num_prompt_tokens // size))
        return requests

    def _plan(self, rng: random.Random) -> None:
        config = self.config
        for request in self._requests:
            self._at(request.arrival_s, partial(self._on_arrival, request))
            if config.disconnect_rate and rng.random() < config.disconnect_rate:
                self._at(request.arrival_s + rng.uniform(0.0, MAX_PATIENCE_S), partial(self._on_disconnect, request))
        for slowdown in config.slowdowns:
            self._at(slowdown.at_s, partial(self._on_slowdown, slowdown))
        for death in config.deaths:
            self._at(death.at_s, partial(self._on_death, death))
        if config.rolling_restart is not None:
            self._at(config.rolling_restart.at_s, partial(self._drain, 0, config.rolling_restart))

    def _at(self, at_s: float, action: Action) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, action))
        self._num_events += 1

    def run(self) -> SimulationResult:
        while self._events:
            now, _, action = heapq.heappop(self._events)
            self._advance(now)
            action(now)
        self._advance(END_OF_TIME)
        for front_end in self.front_ends:
            front_end.listen(END_OF_TIME)
        for request in [*self._unplaced, *(request for front_end in self.front_ends for request in front_end.queued)]:
            request.on_end(request.arrival_s, "no rank came back")
        for rank in self._ranks.values():
            self._keep_log(rank)
        return SimulationResult(self._requests, self._logs)

    def _advance(self, now: float) -> None:
        for rank in self._ranks.values():
            if rank.next_end_s <= now:
                rank.advance(now)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _on_arrival(self, request: SimulatedRequest, now: float) -> None:
        front_end, config = self.front_ends[request.front_end], self.config
        front_end.listen(now)
        if front_end.is_full(config.max_num_queued_requests, config.max_num_queued_tokens):
            request.on_end(now, "refused")
        else:
            self._place(request, now)

    def _place(self, request: SimulatedRequest, now: float) -> None:
        front_end = self.front_ends[request.front_end]
        try:
            front_end.place(request, self._eligible, now)
        except NoRankAvailableError:
            self._unplaced.append(request)
        self._wake_later(front_end)

    def _wake_later(self, front_end: SimulatedFrontEnd) -> None:
        """A front end with a queue looks again with the next news."""
        wake_s = front_end.next_news_s if front_end.queue else NEVER
        if wake_s < self._wakes_s[front_end.index]:
            self._wakes_s[front_end.index] = wake_s
            self._at(wake_s, partial(self._on_news, front_end))

    def _on_news(self, front_end: SimulatedFrontEnd, now: float) -> None:
        if now < self._wakes_s[front_end.index]:
            return
        self._wakes_s[front_end.index] = END_OF_TIME
        front_end.listen(now)
        front_end.bind_queued(self._eligible, now)
        self._wake_later(front_end)

    def _on_disconnect(self, request: SimulatedRequest, now: float) -> None:
        front_end = self.front_ends[request.front_end]
        front_end.listen(now)
        if request in self._unplaced:
            self._unplaced.remove(request)
        if request.num_ends == 0:
            front_end.abort(request, now)
            request.on_departure(now)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _start_rank(self, rank: int, now: float) -> None:
        if self._life_of(rank) is not None:  # two faults asked for it
            return
        self._epochs[rank] += 1
        rank_id = RankId(rank, self._epochs[rank])
        started = SimulatedRank(rank_id, self.config.rank, len(self.front_ends), self._slowness[rank])
        self._ranks[rank_id] = started
        for front_end in self.front_ends:
            front_end.add_rank(started)
        self._eligible.append(rank_id)
        waiting, self._unplaced = self._unplaced, []
        for request in waiting:
            self._place(request, now)
        for front_end in self.front_ends:
            front_end.bind_queued(self._eligible, now)
            self._wake_later(front_end)

    def _life_of(self, rank: int) -> SimulatedRank | None:
        life = self._ranks.get(RankId(rank, self._epochs[rank]))
        return None if life is None or life.is_dead else life

    def _on_slowdown(self, slowdown: Slowdown, now: float) -> None:
        self._slowness[slowdown.rank] = slowdown.factor
        if (rank := self._life_of(slowdown.rank)) is not None:
            rank.slow_down(slowdown.factor)

    def _on_death(self, death: Death, now: float) -> None:
        rank = self._life_of(death.rank)
        if rank is None:
            return
        rank.die()
        self._at(now + self.config.detection_s, partial(self._on_death_known, rank.rank_id))
        if death.restart_after_s is not None:
            restart_s = max(death.restart_after_s, self.config.detection_s)
            self._at(now + restart_s, partial(self._start_rank, death.rank))

    def _on_death_known(self, rank_id: RankId, now: float) -> None:
        """Its requests go on elsewhere, from the last token that their clients have."""
        self._keep_log(self._ranks.pop(rank_id))
        if rank_id in self._eligible:
            self._eligible.remove(rank_id)
        for front_end in self.front_ends:
            front_end.listen(now)
            for handle in front_end.remove_rank(rank_id):
                request = self._requests[handle]
                if self.config.failover:
                    request.num_moves += 1
                    self._place(request, now)
                else:
                    request.on_end(now, "its rank died")

    def _drain(self, rank: int, restart: RollingRestart, now: float) -> None:
        if (life := self._life_of(rank)) is not None and life.rank_id in self._eligible:
            self._eligible.remove(life.rank_id)
        self._stop_when_empty(rank, restart, now + restart.drain_s, now)

    def _stop_when_empty(self, rank: int, restart: RollingRestart, deadline_s: float, now: float) -> None:
        life = self._life_of(rank)
        if life is not None:
            if life.has_work and now < deadline_s:
                self._at(now + DRAIN_POLL_S, partial(self._stop_when_empty, rank, restart, deadline_s))
                return
            life.die()
            self._on_death_known(life.rank_id, now)
        self._at(now + restart.restart_after_s, partial(self._restart_next, rank, restart))

    def _restart_next(self, rank: int, restart: RollingRestart, now: float) -> None:
        self._start_rank(rank, now)
        if rank + 1 < self.config.num_ranks:
            self._drain(rank + 1, restart, now)

    def _keep_log(self, rank: SimulatedRank) -> None:
        self._logs[rank.rank_id.rank].extend(rank.log)

    def check_invariants(self) -> None:
        """After `run`: every request has ended once and left nothing behind."""
        for front_end in self.front_ends:
            front_end.check_invariants()
            assert front_end.ledger.num_in_flight == 0
        for rank in self._ranks.values():
            rank.check_invariants()
            assert not rank.has_work
        assert all(request.num_ends == 1 for request in self._requests)

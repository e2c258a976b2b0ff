"""One front end in virtual time: the real ledger and balancer, and what it has heard of the ranks so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from balancer.dispatch_queue import DispatchQueue
from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.load_balancer import LoadBalancer
from balancer.simulation.rank import NEVER, SimulatedRank, StepReport
from balancer.simulation.request import SimulatedRequest
from cores.block_hash import landmark_stride
from cores.messages import HEARTBEAT_INTERVAL_S, RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """How old a front end's knowledge is. Tokens and ends come with every step; loads may come more rarely."""

    delay_s: float = 0.001
    load_interval_s: float = 0.0  # 0: with every step. Else the state of every multiple of it, as a coordinator publishes it


@dataclass(slots=True, kw_only=True)
class SimulatedRoutingRequest(RoutingRequest):
    """What a policy may know, and for a baseline that knows everything the request itself."""

    request: SimulatedRequest


@dataclass(slots=True)
class _Line:
    """From one rank: what is under way, and loads that are not published yet."""

    rank: SimulatedRank
    outbox: deque[StepReport]
    loads: deque[StepReport] = field(default_factory=deque)
    last_seq: int = 0
    last_read: StepReport | None = None
    heard_s: float = 0.0


class SimulatedFrontEnd:
    def __init__(self, index: int, balancer: LoadBalancer, reporting: Reporting, queue: DispatchQueue | None = None) -> None:
        """With a `queue`, requests wait in it until a rank has room."""
        self.index = index
        self.queue = queue
        self._queued: dict[int, SimulatedRequest] = {}
        self._bound: dict[int, SimulatedRequest] = {}  # from the queue, to be charged for what they get
        self.balancer = balancer
        self.ledger: LoadLedger = balancer.ledger
        self._reporting = reporting
        self._lines: dict[RankId, _Line] = {}
        self._block_size = 0  # of the ranks

    def add_rank(self, rank: SimulatedRank) -> None:
        config = rank.config
        self.ledger.add_rank(
            rank.rank_id,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_kv_blocks=config.num_kv_blocks,
        )
        if self.ledger.prefix_index is not None:
            rank.watch_cache(self.index)
        self._block_size = config.block_size
        self._lines[rank.rank_id] = _Line(rank, rank.outboxes[self.index])

    def listen(self, now: float) -> None:
        """Takes in what ranks have said and has arrived. They are advanced to `now`."""
        delay_s, interval_s = self._reporting.delay_s, self._reporting.load_interval_s
        published_s = now - delay_s if not interval_s else (now - delay_s) // interval_s * interval_s
        for line in self._lines.values():
            if line.outbox and line.outbox[0].end_s + delay_s <= now:
                self._listen_to(line, now - delay_s)
            if line.loads and line.loads[0].end_s <= published_s:
                self._read_load(line, published_s)
            if line.last_read is not None and now - line.heard_s >= HEARTBEAT_INTERVAL_S and not line.rank.is_dead:
                self._take(line, line.last_read, now)  # a rank without a step to tell of sends heartbeats

    def _listen_to(self, line: _Line, until_s: float) -> None:
        while line.outbox and line.outbox[0].end_s <= until_s:
            report = line.outbox.popleft()
            line.loads.append(report)
            if self.ledger.prefix_index is not None and self.index in report.cache_events:
                self.ledger.prefix_index.on_events(report.cache_events[self.index])
            for client, handle in report.first_tokens:
                if client == self.index:
                    self.ledger.on_first_token(handle)
            for client, handle in report.finished:
                if client == self.index:
                    self.ledger.release(handle)
                    self._charge(handle)

    def _charge(self, handle: int) -> None:
        """At its end for all that it got: tokens are not told one by one here."""
        request = self._bound.pop(handle, None)
        if request is not None and self.queue is not None:
            self.queue.on_tokens(request.trace.tenant, request.trace.num_output_tokens)

    def _read_load(self, line: _Line, until_s: float) -> None:
        report = line.loads.popleft()
        while line.loads and line.loads[0].end_s <= until_s:
            report = line.loads.popleft()
        self._take(line, report, report.end_s + self._reporting.delay_s)

    def _take(self, line: _Line, report: StepReport, heard_s: float) -> None:
        line.last_read, line.heard_s = report, heard_s
        self.ledger.on_report(line.rank.rank_id, report.step, report.command_seqs[self.index], report.load, heard_s)

    @property
    def next_news_s(self) -> float:
        """When something arrives that may have made room."""
        sources = ((line.outbox[0].end_s if line.outbox else line.rank.next_end_s) for line in self._lines.values())
        return min(sources, default=NEVER) + max(self._reporting.delay_s, self._reporting.load_interval_s)

    def place(self, request: SimulatedRequest, eligible: Collection[RankId], now: float) -> None:
        """Binds it to a rank, now or when one has room. Raises `NoRankAvailableError`, with early binding only."""
        if self.queue is None:
            self._dispatch(request, eligible, now)
        else:
            self._queued[request.handle] = request
            self.queue.add(request.handle, self.routing(request), request.arrival_s)
            self.bind_queued(eligible, now)

    def bind_queued(self, eligible: Collection[RankId], now: float) -> None:
        """To be called after whatever may have made room."""
        if self.queue:
            for dispatch in self.queue.dispatches(lambda lora_name: eligible, now):
                request = self._bound[dispatch.handle] = self._queued.pop(dispatch.handle)
                self._send(request, dispatch.choice.rank_id, now)

    def _dispatch(self, request: SimulatedRequest, eligible: Collection[RankId], now: float) -> None:
        routing = self.routing(request)
        choice = self.balancer.choose(routing, eligible, now)
        num_new_tokens, new_keys = routing.new_on(choice.rank_id)
        self.ledger.book(request.handle, choice.rank_id, num_new_tokens, new_keys)
        self._send(request, choice.rank_id, now)

    def _send(self, request: SimulatedRequest, rank_id: RankId, now: float) -> None:
        line = self._lines[rank_id]
        line.last_seq += 1
        self.ledger.on_sent(request.handle, line.last_seq)
        request.rank = rank_id.rank
        line.rank.submit(now, line.last_seq, request)

    def routing(self, request: SimulatedRequest) -> SimulatedRoutingRequest:
        """What the balancer is asked with."""
        has_index = self.ledger.prefix_index is not None
        return SimulatedRoutingRequest(
            num_prompt_tokens=request.num_prompt_tokens,
            block_keys=request.landmarks(self._block_size) if has_index else (),
            tokens_per_key=self._block_size * landmark_stride(self._block_size),
            tenant=request.trace.tenant,
            request=request,
        )

    def is_full(self, max_requests: int | None, max_tokens: int | None) -> bool:
        """Whether admission is closed."""
        if max_requests is not None and self.ledger.num_in_flight >= max_requests:
            return True
        num_tokens = 0 if max_tokens is None else sum(self.ledger.view(r).num_prefill_tokens for r in self.ledger.rank_ids)
        return max_tokens is not None and num_tokens >= max_tokens

    def abort(self, request: SimulatedRequest, now: float) -> None:
        """Its client has left. Nothing to do if its end is here already."""
        if self.queue is not None and self.queue.remove(request.handle):
            del self._queued[request.handle]
        self._bound.pop(request.handle, None)
        rank_id = self.ledger.rank_of(request.handle)
        if rank_id is None:
            return
        line = self._lines[rank_id]
        line.last_seq += 1
        line.rank.submit(now, line.last_seq, request, is_abort=True)
        self.ledger.release(request.handle, line.last_seq)

    def remove_rank(self, rank_id: RankId) -> list[int]:
        """It is known to be dead. The handles of the requests that it had."""
        line = self._lines.pop(rank_id)
        self._listen_to(line, float("inf"))  # what it said in time counts, however late it comes
        return self.ledger.remove_rank(rank_id)

    @property
    def queued(self) -> list[SimulatedRequest]:
        return list(self._queued.values())

    def check_invariants(self) -> None:
        self.ledger.check_invariants()
        if self.queue is not None:
            self.queue.check_invariants()
            assert len(self.queue) == len(self._queued)

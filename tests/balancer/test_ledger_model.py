"""The ledger against engines whose reports are late, repeated, reordered or lost.

The model computes every view from scratch out of two sets: what the last accepted report's engine held at that moment, and
what was sent after. The ledger keeps running sums; here nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from balancer.ledger import LoadLedger
from cores.messages import RankId, RankLoad

NUM_RANKS = 2
STEP_TOKENS = 64


@dataclass(frozen=True)
class Report:
    rank_id: RankId
    step: int
    command_seq: int
    held: dict[int, int]  # handle → prompt tokens left
    finished: tuple[int, ...] = ()

    @property
    def load(self) -> RankLoad:
        decodes = sum(left == 0 for left in self.held.values())
        return RankLoad(
            num_waiting=len(self.held) - decodes,
            num_running=decodes,
            num_decodes=decodes,
            num_prefill_tokens=sum(self.held.values()),
        )


@dataclass
class Engine:
    """Applies commands in order, computes prompts first come first served, and tells how it is."""

    rank_id: RankId
    commands: list[tuple[int, str, int, int]] = field(default_factory=list)  # on their way: number, kind, handle, tokens
    last_sent: int = 0
    step: int = 0
    command_seq: int = 0
    held: dict[int, int] = field(default_factory=dict)
    outputs: list[Report] = field(default_factory=list)  # in order and never lost
    reports: list[Report] = field(default_factory=list)  # may be delivered in any order, often or not at all

    def send(self, kind: str, handle: int, tokens: int = 0) -> int:
        self.last_sent += 1
        self.commands.append((self.last_sent, kind, handle, tokens))
        return self.last_sent

    def apply(self, count: int) -> None:
        for seq, kind, handle, tokens in self.commands[:count]:
            self.command_seq = seq
            if kind == "add":
                self.held[handle] = tokens
            else:
                self.held.pop(handle, None)
        del self.commands[:count]

    def run_step(self, num_to_finish: int) -> None:
        self.step += 1
        decoding = [handle for handle, left in self.held.items() if left == 0]
        budget = STEP_TOKENS
        for handle, left in self.held.items():
            self.held[handle] = left - min(left, budget)
            budget -= min(left, budget)
        finished = tuple(decoding[:num_to_finish])
        for handle in finished:
            del self.held[handle]
        self.outputs.append(self.report(finished))

    def report(self, finished: tuple[int, ...] = ()) -> Report:
        return Report(self.rank_id, self.step, self.command_seq, dict(self.held), finished)


@dataclass
class Sent:
    rank_id: RankId
    tokens: int
    seq: int | None = None
    abort_seq: int | None = None
    is_live: bool = True


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.ledger = LoadLedger()
        self.engines: dict[int, Engine] = {}
        self.sent: dict[int, Sent] = {}
        self.last_report: dict[RankId, Report] = {}
        self.old_reports: list[Report] = []
        self.releases: dict[int, int] = {}
        for rank in range(NUM_RANKS):
            self.begin_life(rank, 1)

    def begin_life(self, rank: int, epoch: int) -> None:
        self.engines[rank] = Engine(RankId(rank, epoch))
        self.ledger.add_rank(RankId(rank, epoch), max_num_batched_tokens=STEP_TOKENS, max_num_seqs=8)

    def live(self) -> list[int]:
        return [handle for handle, sent in self.sent.items() if sent.is_live]

    def released(self, handle: int) -> None:
        self.sent[handle].is_live = False
        self.releases[handle] = self.releases.get(handle, 0) + 1

    # --- what a front end does ----------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, NUM_RANKS - 1), tokens=st.integers(1, 200), send_fails=st.booleans() | st.just(False))
    def dispatch(self, rank: int, tokens: int, send_fails: bool) -> None:
        engine, handle = self.engines[rank], len(self.sent) + 1
        self.sent[handle] = Sent(engine.rank_id, tokens)
        self.ledger.book(handle, engine.rank_id, tokens)
        if send_fails:
            assert self.ledger.release(handle)
            self.released(handle)
            return
        self.sent[handle].seq = engine.send("add", handle, tokens)
        self.ledger.on_sent(handle, self.sent[handle].seq)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.live()))
        sent = self.sent[handle]
        sent.abort_seq = self.engines[sent.rank_id.rank].send("abort", handle)
        assert self.ledger.release(handle, sent.abort_seq)
        self.released(handle)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), is_abort=st.booleans())
    def release_what_is_gone(self, data: st.DataObject, is_abort: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.sent)))
        if not self.sent[handle].is_live:
            assert not self.ledger.release(handle, 10**6 if is_abort else None)

    # --- what engines do ----------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, NUM_RANKS - 1), num_commands=st.integers(0, 5), num_to_finish=st.integers(0, 3))
    def engine_steps(self, rank: int, num_commands: int, num_to_finish: int) -> None:
        self.engines[rank].apply(num_commands)
        self.engines[rank].run_step(num_to_finish)

    @rule(rank=st.integers(0, NUM_RANKS - 1), num_commands=st.integers(0, 5))
    def engine_reports(self, rank: int, num_commands: int) -> None:
        """Between steps: it has read commands and computed nothing."""
        self.engines[rank].apply(num_commands)
        self.engines[rank].reports.append(self.engines[rank].report())

    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def engine_dies(self, rank: int) -> None:
        engine = self.engines[rank]
        expected = {handle for handle in self.live() if self.sent[handle].rank_id == engine.rank_id}
        assert set(self.ledger.remove_rank(engine.rank_id)) == expected
        for handle in expected:
            self.released(handle)
        self.old_reports += engine.reports + engine.outputs
        self.begin_life(rank, engine.rank_id.epoch + 1)

    # --- what the network does ----------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def output_arrives(self, rank: int) -> None:
        engine = self.engines[rank]
        if not engine.outputs:
            return
        output = engine.outputs.pop(0)
        engine.reports.append(output)  # its load may come once more, much later
        self.deliver(output)
        for handle in output.held:
            if output.held[handle] == 0:
                self.ledger.on_first_token(handle)
        for handle in output.finished:
            was_live = self.sent[handle].is_live
            assert self.ledger.release(handle) == was_live
            if was_live:
                self.released(handle)

    @rule(rank=st.integers(0, NUM_RANKS - 1), data=st.data())
    def report_arrives_in_any_order(self, rank: int, data: st.DataObject) -> None:
        reports = self.engines[rank].reports
        if reports:
            self.deliver(data.draw(st.sampled_from(reports)))

    @precondition(lambda self: self.old_reports)
    @rule(data=st.data())
    def report_of_an_earlier_life_arrives(self, data: st.DataObject) -> None:
        report = data.draw(st.sampled_from(self.old_reports))
        assert not self.ledger.on_report(report.rank_id, report.step, report.command_seq, report.load, now=0.0)

    def deliver(self, report: Report) -> None:
        last = self.last_report.get(report.rank_id)
        is_news = last is None or (report.step >= last.step and report.command_seq >= last.command_seq)
        accepted = self.ledger.on_report(report.rank_id, report.step, report.command_seq, report.load, now=0.0)
        assert accepted == is_news
        if is_news:
            self.last_report[report.rank_id] = report

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def views_are_the_report_and_what_it_does_not_know(self) -> None:
        for engine in self.engines.values():
            rank_id = engine.rank_id
            report = self.last_report.get(rank_id, Report(rank_id, -1, 0, {}))
            ours = [sent for sent in self.sent.values() if sent.rank_id == rank_id]
            newer = [s for s in ours if s.is_live and (s.seq is None or s.seq > report.command_seq)]
            ghosts = [
                s for s in ours
                if s.seq is not None and s.abort_seq is not None and s.seq <= report.command_seq < s.abort_seq
            ]  # fmt: skip
            view = self.ledger.view(rank_id)
            assert view.num_requests == max(0, len(report.held) - len(ghosts)) + len(newer)
            assert view.num_prefill_tokens == sum(report.held.values()) + sum(s.tokens for s in newer)
            assert view.num_waiting >= len(newer)
            assert min(view.num_waiting, view.num_running, view.num_decodes, view.num_prefill_tokens) >= 0

    @invariant()
    def bookings_are_the_live_requests(self) -> None:
        live = self.live()
        assert self.ledger.num_in_flight == len(live)
        for engine in self.engines.values():
            here = [handle for handle in live if self.sent[handle].rank_id == engine.rank_id]
            assert sorted(self.ledger.handles_on(engine.rank_id)) == here
            assert self.ledger.booked_tokens(engine.rank_id) == sum(self.sent[handle].tokens for handle in here)
            assert self.ledger.view(engine.rank_id).own_in_flight == len(here)

    @invariant()
    def each_request_is_released_at_most_once(self) -> None:
        assert all(count == 1 for count in self.releases.values())

    def teardown(self) -> None:
        """When all is said, the view is exactly what the engine has."""
        for engine in self.engines.values():
            engine.apply(len(engine.commands))
            self.deliver(engine.report())
            while engine.outputs:
                self.output_arrives(engine.rank_id.rank)
            view = self.ledger.view(engine.rank_id)
            load = engine.report().load
            assert (view.num_waiting, view.num_running, view.num_decodes) == (
                load.num_waiting,
                load.num_running,
                load.num_decodes,
            )
            assert view.num_prefill_tokens == load.num_prefill_tokens
            assert sorted(self.ledger.handles_on(engine.rank_id)) == sorted(engine.held)
        self.ledger.check_invariants()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
TestLedgerModel = LedgerMachine.TestCase

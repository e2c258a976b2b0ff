"""What one front end has sent to each rank and what each rank has reported, made one view. Pure: no sockets, no clock.

Rules
-----
* A request is booked before it is sent and released once: it finished, was aborted, could not be sent, or its rank died.
* Every command to a rank has a number, counted from 1 in the order of sending. Every report says the highest number that it
  contains (`command_seq`) and the step it is of.
* A report that knows less than the last one, by step or by number, is ignored. So reports may come late, twice or never.

Theory of operation
-------------------
A view is *report + bookings that it does not contain − aborts that it does not contain*. A booking is contained if its number
is at most the report's; one that is not sent yet never is. So no report erases a newer dispatch, and none counts it twice.

A request that ends by itself needs no correction: the message that says so carries a report of the same step, without it.
An aborted one is in the reports between the number of its dispatch and the number of its abort. There it is taken off the
sequences, but its prompt tokens stay: how many of them are left is not known, and for one step it is better to think a rank
busy than idle. An abort that crosses the end of its request is taken off once too often, for the same one step.

Each change costs the same however many requests are booked: sums are kept, and the numbers are in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from balancer.load import SEQUENCE_TOKENS, RankView
from balancer.prefix_index import PrefixIndex
from cores.block_hash import BlockKey
from cores.messages import RankId, RankLoad


class UnknownRankIdError(LookupError):
    """No such life of a rank in the ledger. The caller's bug: it books on ranks that it has added."""


@dataclass(slots=True)
class _Booking:
    handle: int
    num_prompt_tokens: int
    seq: int | None = None  # of the command that carried it; None: not sent yet
    abort_seq: int | None = None
    has_first_token: bool = False
    is_live: bool = True

    def is_sent_by(self, command_seq: int) -> bool:
        return self.seq is not None and self.seq <= command_seq

    def is_aborted_by(self, command_seq: int) -> bool:
        return self.abort_seq is not None and self.abort_seq <= command_seq


@dataclass(slots=True)
class _Account:
    """One rank's last report beside our bookings there, and the view of both.

    The ledger itself books on it: calls between objects were a third of what a decision cost.
    """

    rank_id: RankId
    view: RankView
    step: int = -1
    command_seq: int = 0
    load: RankLoad = field(default_factory=RankLoad)
    live: dict[int, _Booking] = field(default_factory=dict)
    num_booked_tokens: int = 0
    # Aborted ones that the report contains, and whose abort it does not: by whether they had their first token.
    num_ghosts_waiting: int = 0
    num_ghosts_running: int = 0
    unreported: deque[_Booking] = field(default_factory=deque)  # sent, by number; dead ones are passed over when they come up
    aborts: deque[_Booking] = field(default_factory=deque)  # aborted and not yet reported so, by number of the abort

    def release(self, handle: int, abort_seq: int | None) -> None:
        booking = self.live.pop(handle)
        booking.is_live = False
        self.num_booked_tokens -= booking.num_prompt_tokens
        self.view.own_in_flight -= 1
        is_reported = booking.seq is not None and booking.seq <= self.command_seq
        if not is_reported:
            self._take_off_unreported(booking.num_prompt_tokens)
        if abort_seq is not None and abort_seq > self.command_seq and booking.seq is not None:
            booking.abort_seq = abort_seq
            self.aborts.append(booking)
            if is_reported:
                self._add_ghost(booking, 1)
                self._show_load()

    def on_report(self, step: int, command_seq: int, load: RankLoad, now: float) -> bool:
        if step < self.step or command_seq < self.command_seq:
            return False
        self.step, self.command_seq, self.load, self.view.reported_at = step, command_seq, load, now
        while self.unreported and self.unreported[0].is_sent_by(command_seq):
            booking = self.unreported.popleft()
            if booking.is_live:
                self._take_off_unreported(booking.num_prompt_tokens)
            elif booking.abort_seq is not None:
                self._add_ghost(booking, 1)
        while self.aborts and self.aborts[0].is_aborted_by(command_seq):
            self._add_ghost(self.aborts.popleft(), -1)
        self._show_load()
        return True

    def _take_off_unreported(self, num_tokens: int) -> None:
        view = self.view
        view.num_unreported -= 1
        view.num_unreported_tokens -= num_tokens
        view.num_waiting -= 1
        view.num_prefill_tokens -= num_tokens
        view.load_tokens -= num_tokens + SEQUENCE_TOKENS

    def _add_ghost(self, booking: _Booking, number: int) -> None:
        if booking.has_first_token:
            self.num_ghosts_running += number
        else:
            self.num_ghosts_waiting += number

    def _show_load(self) -> None:
        """All of the view that follows from the report and the ghosts in it."""
        load, view = self.load, self.view
        # A ghost without a first token was waiting or had its prompt computed: where no one waits it was running.
        num_waiting = load.num_waiting - self.num_ghosts_waiting
        view.num_waiting = max(0, num_waiting) + view.num_unreported
        view.num_running = max(0, load.num_running - self.num_ghosts_running + min(0, num_waiting))
        view.num_prefill_tokens = max(0, load.num_prefill_tokens) + view.num_unreported_tokens
        view.num_decodes = max(0, load.num_decodes - self.num_ghosts_running)
        view.kv_cache_usage = load.num_kv_blocks_used / load.num_kv_blocks if load.num_kv_blocks else 0.0
        view.step_ms = load.step_ms
        view.prefill_tokens_per_s = load.prefill_tokens_per_s
        view.decode_tokens_per_s = load.decode_tokens_per_s
        view.load_tokens = view.in_tokens()

    def check_invariants(self) -> None:
        unreported = [b for b in self.live.values() if not b.is_sent_by(self.command_seq)]
        ghosts = [b for b in self.aborts if b.is_sent_by(self.command_seq)]
        view = self.view
        assert view.num_unreported == len(unreported)
        assert view.num_unreported_tokens == sum(b.num_prompt_tokens for b in unreported)
        assert view.own_in_flight == len(self.live)
        assert view.load_tokens == view.in_tokens()
        assert self.num_booked_tokens == sum(b.num_prompt_tokens for b in self.live.values())
        assert self.num_ghosts_running == sum(b.has_first_token for b in ghosts)
        assert self.num_ghosts_waiting == len(ghosts) - self.num_ghosts_running
        assert [b.handle for b in self.unreported if b.is_live] == [b.handle for b in unreported if b.seq is not None]
        assert not any(b.is_aborted_by(self.command_seq) or b.is_live for b in self.aborts)
        assert all(b.is_live for b in self.live.values())
        shown = replace(view)
        self._show_load()
        assert view == shown


class LoadLedger:
    """Every request of this front end that a rank has, by handle, and the ranks' views that follow. One per front end.

    With a `prefix_index`, the blocks that a request will leave in the rank's cache are booked and released along with it.
    """

    def __init__(self, prefix_index: PrefixIndex | None = None) -> None:
        self.prefix_index = prefix_index
        self._accounts: dict[RankId, _Account] = {}
        self._asked_for: list[RankId] = []
        self._answer: list[RankView] = []
        self._account_of: dict[int, _Account] = {}
        self._rank_numbers: set[int] = set()

    def add_rank(
        self,
        rank_id: RankId,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_kv_blocks: int | None = None,
    ) -> None:
        """A rank said that it is ready."""
        if rank_id in self._accounts:
            raise ValueError(f"{rank_id} is in the ledger already")
        self._accounts[rank_id] = _Account(rank_id, RankView(rank_id, max_num_batched_tokens, max_num_seqs))
        self._rank_numbers.add(rank_id.rank)
        if self.prefix_index is not None:
            self.prefix_index.add_rank(rank_id, num_kv_blocks)

    def remove_rank(self, rank_id: RankId, *, for_good: bool = False) -> list[int]:
        """The handles that were booked there, all released now. Empty if the rank is not, or no longer, there.

        `for_good`: an operator has removed the rank; else another life of it may come.
        """
        if for_good:
            self._rank_numbers.discard(rank_id.rank)
        account = self._accounts.pop(rank_id, None)
        if account is None:
            return []
        self._asked_for, self._answer = [], []  # this life's view is not to be had any more
        for handle in account.live:
            del self._account_of[handle]
        if self.prefix_index is not None:
            self.prefix_index.remove_rank(rank_id)
        return list(account.live)

    def book(self, handle: int, rank_id: RankId, num_prompt_tokens: int, block_keys: Sequence[BlockKey] = ()) -> None:
        """`num_prompt_tokens` are those that it will have to compute, `block_keys` the landmarks among these."""
        if handle in self._account_of:
            raise ValueError(f"request {handle} is booked already, on {self._account_of[handle].rank_id}")
        account = self._accounts.get(rank_id) or self._account(rank_id)
        account.live[handle] = _Booking(handle, num_prompt_tokens)
        account.num_booked_tokens += num_prompt_tokens
        view = account.view
        view.own_in_flight += 1
        view.num_unreported += 1
        view.num_unreported_tokens += num_prompt_tokens
        view.num_waiting += 1
        view.num_prefill_tokens += num_prompt_tokens
        view.load_tokens += num_prompt_tokens + SEQUENCE_TOKENS
        self._account_of[handle] = account
        if self.prefix_index is not None:
            self.prefix_index.book(handle, rank_id, block_keys)

    def on_sent(self, handle: int, seq: int) -> None:
        account = self._account_of[handle]
        booking, unreported = account.live[handle], account.unreported
        last_seq = (unreported[-1].seq if unreported else None) or account.command_seq
        if seq <= last_seq:
            raise ValueError(f"{account.rank_id}: command {seq} is not after {last_seq}")
        if booking.seq is not None:
            raise ValueError(f"request {handle} sent twice, as commands {booking.seq} and {seq}")
        booking.seq = seq
        unreported.append(booking)

    def on_first_token(self, handle: int) -> None:
        """Makes the view exact after an abort. Output of a request that we released meanwhile may still come: no-op."""
        account = self._account_of.get(handle)
        if account is not None:
            account.live[handle].has_first_token = True

    def release(self, handle: int, abort_seq: int | None = None) -> bool:
        """The one way out, for whatever reason. False if it is not booked: finish, abort and death may race.

        With `abort_seq`, the number of our abort, the rank has it until a report contains that number. Without, it is gone.
        """
        account = self._account_of.pop(handle, None)
        if account is None:
            return False
        account.release(handle, abort_seq)
        if self.prefix_index is not None:
            self.prefix_index.release(handle)
        return True

    def on_report(self, rank_id: RankId, step: int, command_seq: int, load: RankLoad, now: float) -> bool:
        """False if it was ignored: older than the last, or of another life of the rank."""
        account = self._accounts.get(rank_id)
        return account is not None and account.on_report(step, command_seq, load, now)

    def rank_of(self, handle: int) -> RankId | None:
        account = self._account_of.get(handle)
        return None if account is None else account.rank_id

    def handles_on(self, rank_id: RankId) -> list[int]:
        account = self._accounts.get(rank_id)
        return [] if account is None else list(account.live)

    def view(self, rank_id: RankId) -> RankView:
        return self._account(rank_id).view

    def views(self, rank_ids: Collection[RankId]) -> Sequence[RankView]:
        """In rank order. Mostly the same ranks are asked for, and then it is the same answer."""
        if rank_ids != self._asked_for:
            self._answer = [self._account(rank_id).view for rank_id in sorted(rank_ids)]
            self._asked_for = list(rank_ids)
        return self._answer

    def booked_tokens(self, rank_id: RankId) -> int:
        """Prompt tokens of our live requests there, computed or not; 0 for a rank that is not there."""
        account = self._accounts.get(rank_id)
        return 0 if account is None else account.num_booked_tokens

    def num_booked(self, rank_id: RankId) -> int:
        """Our live requests there; 0 for a rank that is not there."""
        account = self._accounts.get(rank_id)
        return 0 if account is None else len(account.live)

    @property
    def num_unreported_tokens(self) -> int:
        """Prompt tokens of our live requests that no report contains."""
        return sum(account.view.num_unreported_tokens for account in self._accounts.values())

    @property
    def num_in_flight(self) -> int:
        return len(self._account_of)

    @property
    def rank_ids(self) -> list[RankId]:
        return sorted(self._accounts)

    @property
    def rank_numbers(self) -> frozenset[int]:
        """Every rank that was here and was not removed for good: one whose engine is dead at the moment still exists."""
        return frozenset(self._rank_numbers)

    def _account(self, rank_id: RankId) -> _Account:
        account = self._accounts.get(rank_id)
        if account is None:
            raise self._unknown(rank_id)
        return account

    def _unknown(self, rank_id: RankId) -> UnknownRankIdError:
        there = ", ".join(map(str, self.rank_ids)) or "none"
        return UnknownRankIdError(f"{rank_id} is not in the ledger; there are {there}")

    def check_invariants(self) -> None:
        for account in self._accounts.values():
            account.check_invariants()
            assert all(self._account_of[handle] is account for handle in account.live)
        assert sum(len(account.live) for account in self._accounts.values()) == len(self._account_of)
        if self.prefix_index is not None:
            self.prefix_index.check_invariants()
            assert self.prefix_index.booked_handles <= self._account_of.keys()

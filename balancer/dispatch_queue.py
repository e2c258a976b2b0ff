"""Requests that are bound to no rank yet, and when each is bound to which. Pure: `now` comes in, what to send goes out.

Rules
-----
* A request is bound when the rank that is best for it has room: less prefill than `DEPTH_STEPS` full steps. What a rank has
  more than that would only wait there, where no priority reaches it, an abort costs a message and a death a move.
* The order is of priority and arrival: one level of priority is worth `AGEING_S` seconds of waiting, so nobody starves. With
  "shortest" a prompt token counts as `SECONDS_PER_TOKEN` of waiting less. With "fair" the tenant that was served least is next
  (`FairShare`), and that order is the one among its own requests.
* Who is bound is decided from the head of the queue on. One whose best rank has no room waits for it, and those behind it for
  other ranks pass, up to `LOOK_AHEAD` of them. Nobody passes it on the way to the same rank.
* After a pass no rank with room is the best one of a request among the first `LOOK_AHEAD`.
* A request whose deadline has passed is never bound, nor one that is pinned to a rank that takes no requests. Whoever owns it
  takes it out; until then it stands in nobody's way.

Theory of operation
-------------------
The order does not change with time: all age alike, so (priority · AGEING_S + arrival) is a place for life, and the queue is a
sorted list; with "fair", one for each tenant. Those that were passed over in a pass count there as if they had been served, or
one tenant's requests for a busy rank would hide the others'.

"Best" is the policy's word, and the policy must know of the queue, too: while a pass looks at a request, those ahead of it that
wait for a rank are booked there as if they were sent. So the second to wait for a rank sees its true wait, and may find that
another is better by now. At the end of the pass these bookings are released.

Each front end has a queue and takes 1/K of the room that a rank has left, so that K of them do not fill it K times over. Order
is kept within a front end only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from balancer.fair_share import FairShare, Tenant
from balancer.load import RankView, RoutingRequest
from balancer.load_balancer import LoadBalancer, NoRankAvailableError, UnknownRankError
from balancer.policy import Choice
from cores.messages import RankId

DispatchOrder = Literal["fcfs", "shortest", "fair"]

DEPTH_STEPS = 2.0  # the step that runs, still in the last report, and the one that must be there when it ends
AGEING_S = 5.0
SECONDS_PER_TOKEN = 0.5e-3
LOOK_AHEAD = 32
KV_FULL = 0.95  # from here on a rank with waiting requests keeps them waiting

Eligible = Callable[[str | None], Collection[RankId]]  # the ranks for a request with this LoRA adapter


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this request to that rank. It is booked there already."""

    handle: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Queued:
    handle: int
    request: RoutingRequest
    place: tuple[float, int]  # of two with the same number, the one that came first
    deadline: float | None


class DispatchQueue:
    """One per front end. Books what it dispatches; releases are the ledger's, as with early binding."""

    def __init__(self, balancer: LoadBalancer, order: DispatchOrder = "fcfs", num_front_ends: int = 1) -> None:
        self.num_tokens = 0  # prompt tokens of all that wait
        self._balancer = balancer
        self._ledger = balancer.ledger
        self._order = order
        self._num_front_ends = num_front_ends
        self._num_added = 0
        self._lanes: dict[Tenant, list[_Queued]] = {}  # one for all, unless tenants get equal shares; none is empty
        self._by_handle: dict[int, _Queued] = {}
        self._share = FairShare()

    @property
    def is_fair(self) -> bool:
        return self._order == "fair"

    def __len__(self) -> int:
        return len(self._by_handle)

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def add(self, handle: int, request: RoutingRequest, now: float, deadline: float | None = None) -> None:
        assert handle not in self._by_handle, f"request {handle} is queued already"
        self._num_added += 1
        place = request.priority * AGEING_S + now
        if self._order == "shortest":
            place += request.num_prompt_tokens * SECONDS_PER_TOKEN
        queued = _Queued(handle, request, (place, self._num_added), deadline)
        insort(self._lane_for(request), queued, key=_place)
        self._by_handle[handle] = queued
        self.num_tokens += request.num_prompt_tokens

    def _lane_for(self, request: RoutingRequest) -> list[_Queued]:
        name = self._lane_name(request)
        if name not in self._lanes:
            self._share.begin_waiting(name)
            self._lanes[name] = []
        return self._lanes[name]

    def _lane_name(self, request: RoutingRequest) -> Tenant:
        return request.tenant if self.is_fair else None

    def on_tokens(self, tenant: Tenant, number: int) -> None:
        """A request that was dispatched from here got these. Needed only where `is_fair`."""
        self._share.on_tokens(tenant, number)

    def remove(self, handle: int) -> bool:
        """Its client has gone, or its time is over. False when it does not wait here."""
        queued = self._by_handle.get(handle)
        if queued is None:
            return False
        self._remove(queued)
        return True

    def dispatches(self, eligible: Eligible, now: float) -> Generator[Dispatch]:
        """One pass. Each is to be sent before the next is asked for, or released if it cannot be sent; nothing else is to
        happen in between. To be run after `add` and whatever may have made room: a report, a release, a rank that came."""
        expected: list[int] = []  # those that wait for a rank, booked there for the time of the pass
        try:
            num_passed = 0
            for queued in self._in_order():
                if num_passed == LOOK_AHEAD or not self._any_has_room(eligible(None)):
                    break
                choice = None
                if queued.deadline is None or now < queued.deadline:
                    choice = self._choose(queued.request, eligible, now)
                if choice is None:
                    continue  # too late, or its rank is not there: whoever owns it takes it out, soon
                if self._has_room(choice.rank_id):
                    num_tokens = self._book(queued, choice)
                    self._share.on_dispatch(self._lane_name(queued.request), num_tokens)
                    self._remove(queued)
                    yield Dispatch(queued.handle, choice)
                    continue
                self._book(queued, choice)
                expected.append(queued.handle)
                num_passed += 1
        finally:
            for handle in expected:
                self._ledger.release(handle)

    def _in_order(self) -> Iterator[_Queued]:
        """All that wait, each in its turn. Whoever still waits when the next is asked for was passed over."""
        num_passed: dict[Tenant, int] = {}
        expected: dict[Tenant, float] = {}  # tokens of those

        def turn(name: Tenant) -> tuple[float, tuple[float, int]]:
            first = self._lanes[name][num_passed.get(name, 0)]
            return self._share.served(name) + expected.get(name, 0.0), first.place

        while names := [name for name, lane in self._lanes.items() if num_passed.get(name, 0) < len(lane)]:
            name = min(names, key=turn)
            queued = self._lanes[name][num_passed.get(name, 0)]
            yield queued
            if queued.handle in self._by_handle:
                num_passed[name] = num_passed.get(name, 0) + 1
                expected[name] = expected.get(name, 0.0) + queued.request.num_prompt_tokens

    def _choose(self, request: RoutingRequest, eligible: Eligible, now: float) -> Choice | None:
        try:
            return self._balancer.choose(request, eligible(request.lora_name), now)
        except (NoRankAvailableError, UnknownRankError):
            return None

    def _book(self, queued: _Queued, choice: Choice) -> int:
        """How many tokens of its prompt that rank will have to compute."""
        num_tokens, new_keys = queued.request.new_on(choice.rank_id)
        self._ledger.book(queued.handle, choice.rank_id, num_tokens, new_keys)
        return num_tokens

    def _any_has_room(self, rank_ids: Collection[RankId]) -> bool:
        return any(self._has_room(rank_id) for rank_id in rank_ids)

    def _has_room(self, rank_id: RankId) -> bool:
        return has_room(self._ledger.view(rank_id), self._num_front_ends)

    def _remove(self, queued: _Queued) -> None:
        name = self._lane_name(queued.request)
        lane = self._lanes[name]
        index = bisect_left(lane, queued.place, key=_place)
        assert lane[index] is queued
        del lane[index]
        if not lane:
            del self._lanes[name]
            self._share.end_waiting(name)
        del self._by_handle[queued.handle]
        self.num_tokens -= queued.request.num_prompt_tokens

    def check_invariants(self) -> None:
        self._share.check_invariants()
        assert all(lane == sorted(lane, key=_place) and lane for lane in self._lanes.values())
        assert self._by_handle == {queued.handle: queued for lane in self._lanes.values() for queued in lane}
        assert all(self._lane_name(queued.request) == name for name, lane in self._lanes.items() for queued in lane)
        assert self.num_tokens == sum(queued.request.num_prompt_tokens for queued in self._by_handle.values())
        assert not any(map(self._ledger.rank_of, self._by_handle))  # nothing of a pass is left


def has_room(view: RankView, num_front_ends: int = 1) -> bool:
    """Whether a rank should get one more from one of so many front ends. An idle one always should."""
    num_spare = view.max_num_seqs // 16  # a place that gets free is taken by the next step, not by the one after the report
    places = view.max_num_seqs + num_spare - (view.num_requests - view.num_unreported)
    tokens = DEPTH_STEPS * view.max_num_batched_tokens - (view.num_prefill_tokens - view.num_unreported_tokens)
    if view.kv_cache_usage > KV_FULL and view.num_waiting > view.num_unreported:
        return False
    return view.num_unreported * num_front_ends < places and view.num_unreported_tokens * num_front_ends < tokens


def _place(queued: _Queued) -> tuple[float, int]:
    return queued.place

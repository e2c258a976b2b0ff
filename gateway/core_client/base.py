"""What `AsyncLLM` asks of a core client, and what comes back through its one output queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from balancer.load import RoutingRequest
from cores.block_hash import BlockKey
from cores.config import UNIX_SOCKETS, Transport
from cores.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, RankId, UtilityResult
from gateway.status import RankStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndPlace:
    """Where a front end stands among the processes."""

    index: int = 0
    life: int = 1  # how often a front end of this index has started
    run_directory: str  # of this life of the front end: its Unix sockets live there
    control_address: str | None = None  # of the launcher; None: embedded, the client starts one as its child
    transport: Transport = UNIX_SOCKETS
    url: str = ""  # where its HTTP server is reached
    shared_directory: str | None = None  # of all front ends of the endpoint; None: it is the only one


@dataclass(frozen=True, slots=True)
class EngineDied:
    """A rank's life is over. Queued behind all that arrived from it: tokens first, then the death."""

    rank_id: RankId
    cause: str
    is_blameless: bool = False  # an operator's order, or the loss of its node: no request can be its cause


@dataclass(frozen=True, slots=True)
class RanksChanged:
    """A rank takes requests again, or for the first time."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """No rank is left and none will come back."""

    cause: str


Received = EngineCoreOutputs | UtilityResult | EngineDied | RanksChanged | EngineFailed


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as it was given to a rank."""

    request: EngineCoreRequest
    routing: RoutingRequest
    num_deaths: int = 0  # of ranks, that it was there at
    has_moved: bool = False  # an earlier rank has had it
    arrived_s: float = 0.0  # on the client's clock
    deadline_s: float | None = None  # on the same


class EngineCoreClient(ABC):
    """Sends requests to ranks and brings back what they say. Requests are known by handle."""

    @abstractmethod
    async def start(self) -> None:
        """Connects to the launcher (embedded: starts it) and waits until every rank is ready.

        Raises `EngineDeadError` with the engine's cause when a rank fails to start or the time is over.
        """

    @abstractmethod
    def next_handle(self) -> int:
        """Never used twice."""

    def prefix_of(self, request: EngineCoreRequest) -> tuple[Sequence[BlockKey], int]:
        """`block_keys` and `tokens_per_key` of its `RoutingRequest`; none where no rank is chosen by them."""
        return (), 0

    @property
    def queued_handles(self) -> Collection[int]:
        """Sequences that wait here until a rank has room for them."""
        return ()

    def take_stranded(self) -> list[SentRequest]:
        """Takes out those that wait here for a rank that takes no requests, while others do."""
        return []

    @abstractmethod
    def forget_queued(self) -> None:
        """Nobody will ever take what waits; who waits has been told."""

    @abstractmethod
    def add_request(self, sent: SentRequest) -> RankId | None:
        """Chooses a rank, books the request there and sends it; returns the rank. All or nothing. With late binding it may wait
        here first: None, and `on_bound` is called later.

        Raises `OverloadedError` when no rank is eligible now, `EngineDeadError` when none will be, `InvalidRequestError` for an
        impossible rank.
        """

    @abstractmethod
    def abort_requests(self, handles: Collection[int]) -> None:
        """One ABORT to each rank that holds some of them. Unknown handles are no-ops."""

    @abstractmethod
    def release(self, handles: Collection[int]) -> None:
        """These ended by themselves: takes them off the books."""

    @abstractmethod
    async def get_received(self) -> Received:
        """The next thing that any rank said, in the order of arrival."""

    @abstractmethod
    def on_engine_died(self, died: EngineDied) -> list[SentRequest]:
        """Closes the books of a dead rank and returns what it held."""

    @abstractmethod
    async def order(self, action: str, *, rank: int = 0, size: int = 0, drain_timeout_s: float = 0.0) -> None:
        """Has the launcher do what an operator wants of the group, see `GroupOrder`; returns when it is done.

        Raises `InvalidRequestError` (404 for an unknown rank, 409 for what cannot be done now), `EngineDeadError` when a rank
        does not come up.
        """

    @property
    @abstractmethod
    def awaits_restart(self) -> bool:
        """No rank serves, but one will."""

    @abstractmethod
    async def call_utility(self, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """The results of all ranks, by rank; see `EngineClient.call_utility_by_rank`. All ranks get all calls in one order."""

    @abstractmethod
    async def tell_ranks(
        self,
        method: str,
        *args: Any,
        rank_ids: Sequence[RankId] | None = None,
        timeout_s: float | None = None,
        insist: bool = False,
    ) -> int:
        """See `Operations.tell_ranks`."""

    @abstractmethod
    def on_utility_result(self, result: UtilityResult) -> None: ...

    @property
    @abstractmethod
    def ready_messages(self) -> Sequence[EngineReady]:
        """Of the living ranks, by rank."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why no rank is left and none will come back; None while there is hope."""

    @property
    @abstractmethod
    def standstill(self) -> str | None:
        """ "draining", "paused" or "sleeping" when that is why no rank takes requests."""

    @property
    @abstractmethod
    def standstill_cause(self) -> str:
        """The same for people: whose order it was, where that is known, and how it is undone."""

    @property
    @abstractmethod
    def num_reported_tokens(self) -> int:
        """Prompt tokens that the ranks say they still have to compute, of all front ends together."""

    @property
    @abstractmethod
    def num_unreported_tokens(self) -> int:
        """Prompt tokens that were sent from here and are in no report yet."""

    @abstractmethod
    def rank_statuses(self, now: float) -> list[RankStatus]: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

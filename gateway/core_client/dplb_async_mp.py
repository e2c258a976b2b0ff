"""Internal load balancing: one endpoint, several ranks, a rank chosen for each request, at once or when one has room."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Collection, Sequence
from itertools import repeat

from balancer.dispatch_queue import DispatchQueue
from balancer.ledger import LoadLedger
from balancer.load import RoutingRequest
from balancer.load_balancer import LoadBalancer, NoRankAvailableError, UnknownRankError
from balancer.policies import make_policy, make_prefix_index
from balancer.policy import Choice
from cores.block_hash import BlockKey, landmark_stride, prefix_keys, root_hash
from cores.messages import EngineCoreOutputs, EngineCoreRequest, RankId
from gateway.config import GatewayConfig
from gateway.core_client.async_mp import AsyncMPClient
from gateway.core_client.base import FrontEndPlace, SentRequest
from gateway.errors import EngineDeadError, InvalidRequestError


class DPLBAsyncMPClient(AsyncMPClient):
    """Asks its `LoadBalancer` per request; contains no policy itself."""

    def __init__(
        self,
        config: GatewayConfig,
        place: FrontEndPlace,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        policy, num_front_ends = config.balancer.load_balancing_policy, config.server.api_server_count
        index = make_prefix_index(policy) if config.engine.enable_prefix_caching else None
        super().__init__(config, place, clock, LoadLedger(index))
        self._balancer = LoadBalancer(make_policy(policy, rng or random.Random(), num_front_ends), self.ledger)
        self._queue: DispatchQueue | None = None
        if config.balancer.dispatch == "late":
            self._queue = DispatchQueue(self._balancer, config.balancer.dispatch_order, num_front_ends)
        self._queued: dict[int, SentRequest] = {}

    def prefix_of(self, request: EngineCoreRequest) -> tuple[Sequence[BlockKey], int]:
        ready = next(iter(self.ready_messages), None)
        # Log-probabilities of a prompt, and vectors, are computed whatever the cache has.
        needs_all = request.sampling_params.prompt_logprobs is not None or request.pooling_params is not None
        if self.ledger.prefix_index is None or ready is None or needs_all:
            return (), 0
        root = root_hash(request.lora_id, request.cache_salt)
        tokens_per_key = ready.block_size * landmark_stride(ready.block_size)
        return prefix_keys(request.prompt_token_ids, ready.block_size, root), tokens_per_key

    def _choose(self, routing: RoutingRequest, now: float) -> Choice:
        eligible = self.ranks.eligible_for(routing.lora_name) if routing.pinned_rank is None else self.eligible
        try:
            return self._balancer.choose(routing, eligible, now)
        except UnknownRankError as error:
            if routing.pinned_rank is not None and self.ranks.find(routing.pinned_rank) is not None:  # it was not heard yet
                raise self.ranks.unavailable() from error
            raise InvalidRequestError(f"data_parallel_rank: {error}", "data_parallel_rank") from error
        except NoRankAvailableError as error:
            raise self.ranks.unavailable() from error

    # --- late binding -------------------------------------------------------------------------------------------------

    def add_request(self, sent: SentRequest) -> RankId | None:
        if self._queue is None:
            return super().add_request(sent)
        if sent.routing.pinned_rank is not None or not self.eligible:
            self._choose(sent.routing, self._clock())  # what cannot be sent at all is refused now, as with early binding
        self._enqueue(self._queue, sent)
        self._on_room()
        return self.ledger.rank_of(sent.request.handle)

    def _enqueue(self, queue: DispatchQueue, sent: SentRequest) -> None:
        """At the place of its arrival: what a rank's death has moved goes before what has come since."""
        self._queued[sent.request.handle] = sent
        queue.add(sent.request.handle, sent.routing, sent.arrived_s, sent.deadline_s)

    def _on_room(self) -> None:
        if not self._queue:
            return
        # For the time of a pass.
        eligible: Callable[[str | None], Collection[RankId]] = functools.cache(self.ranks.eligible_for)
        with contextlib.closing(self._queue.dispatches(eligible, self._clock())) as dispatches:
            for dispatch in dispatches:
                sent, rank_id = self._queued.pop(dispatch.handle), dispatch.choice.rank_id
                try:
                    self._send_booked(sent, rank_id)
                except EngineDeadError:  # its death is about to be known, and then it is not eligible
                    self._enqueue(self._queue, sent)
                    return
                self.on_bound(dispatch.handle, rank_id)

    def _note_tokens(self, outputs: EngineCoreOutputs) -> None:
        if self._queue is not None and self._queue.is_fair:
            for handle, number in zip(outputs.handles, outputs.counts or repeat(1), strict=False):
                if (sent := self._sent.get(handle)) is not None:
                    self._queue.on_tokens(sent.routing.tenant, number)

    def abort_requests(self, handles: Collection[int]) -> None:
        for handle in handles:
            if self._queue is not None and self._queue.remove(handle):
                del self._queued[handle]
        super().abort_requests(handles)

    @property
    def queued_handles(self) -> Collection[int]:
        return self._queued.keys()

    @property
    def num_unreported_tokens(self) -> int:
        return super().num_unreported_tokens + (self._queue.num_tokens if self._queue is not None else 0)

    def take_stranded(self) -> list[SentRequest]:
        if self._queue is None or not (eligible := self.eligible):
            return []
        ranks = {rank_id.rank for rank_id in eligible}
        stranded = [sent for sent in self._queued.values() if sent.routing.pinned_rank not in (None, *ranks)]
        for sent in stranded:
            self._queue.remove(sent.request.handle)
            del self._queued[sent.request.handle]
        return stranded

    def forget_queued(self) -> None:
        for handle in list(self._queued):
            if self._queue is not None and self._queue.remove(handle):
                del self._queued[handle]

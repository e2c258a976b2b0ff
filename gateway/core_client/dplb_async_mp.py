"""Internal load balancing: one endpoint, several ranks, a rank chosen for each request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from balancer.load import RoutingRequest
from balancer.load_balancer import LoadBalancer, NoRankAvailableError, UnknownRankError
from balancer.policies import make_policy
from cores.messages import RankId
from gateway.config import GatewayConfig
from gateway.core_client.async_mp import AsyncMPClient
from gateway.core_client.base import FrontEndPlace
from gateway.errors import InvalidRequestError


class DPLBAsyncMPClient(AsyncMPClient):
    """Asks its `LoadBalancer` per request; contains no policy itself."""

    def __init__(
        self,
        config: GatewayConfig,
        place: FrontEndPlace,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(config, place, clock)
        policy = make_policy(config.balancer.load_balancing_policy, rng or random.Random())
        self._balancer = LoadBalancer(policy, self.ledger)

    def _choose(self, routing: RoutingRequest, now: float) -> RankId:
        eligible = self.ranks.eligible_for(routing.lora_name) if routing.pinned_rank is None else self.eligible
        try:
            return self._balancer.choose(routing, eligible, now).rank_id
        except UnknownRankError as error:
            raise InvalidRequestError(f"data_parallel_rank: {error}", "data_parallel_rank") from error
        except NoRankAvailableError as error:
            raise self.ranks.unavailable() from error

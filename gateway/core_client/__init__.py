"""The three clients that reach engine cores, from one core to a balanced group. `make_async_mp_client` chooses.

AsyncMPClient        one engine core; what all of them are made of
├── DPAsyncMPClient    external load balancer in front: its own rank only
└── DPLBAsyncMPClient  internal or hybrid load balancing: asks the balancer for a rank per request, of all ranks or its node's

rank_link, launcher_link         sockets: to the ranks, to the launcher
ranks                            lives of ranks, doubts about them, and the one way into death; `rank` is one of them
utility_calls, orders, aborts_elsewhere, commands_seen    what was asked and is not answered yet, by whom
group_view, coordinator_link     an endpoint that is a part of its group (external, hybrid) sees the others
"""

from __future__ import annotations

from gateway.config import GatewayConfig
from gateway.core_client.async_mp import AsyncMPClient
from gateway.core_client.base import FrontEndPlace
from gateway.core_client.dp_async_mp import DPAsyncMPClient
from gateway.core_client.dplb_async_mp import DPLBAsyncMPClient

__all__ = ["AsyncMPClient", "DPAsyncMPClient", "DPLBAsyncMPClient", "core_client_class", "make_async_mp_client"]


def core_client_class(config: GatewayConfig) -> type[AsyncMPClient]:
    """Which client serves this configuration."""
    if config.parallel.is_external:
        return DPAsyncMPClient
    if config.parallel.data_parallel_size > 1:
        return DPLBAsyncMPClient
    return AsyncMPClient


def make_async_mp_client(config: GatewayConfig, place: FrontEndPlace) -> AsyncMPClient:
    return core_client_class(config)(config, place)

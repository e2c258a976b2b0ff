"""External load balancing: this endpoint's own rank only."""

from __future__ import annotations

from gateway.core_client.async_mp import AsyncMPClient


class DPAsyncMPClient(AsyncMPClient):
    """One of several endpoints behind a load balancer. What it knows of the others is its `group` view, for people to see."""

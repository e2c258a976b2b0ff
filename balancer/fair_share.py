"""Whose turn it is, by the tokens that each tenant was served: a virtual token counter for each. Pure.

Rules
-----
* A tenant's counter grows by the prompt tokens that are dispatched for it, and by `OUTPUT_WEIGHT` for each token that it gets.
* Of those that wait, the tenant with the least counter is next.
* Who comes back after it had nothing waiting does not keep what it did not use: its counter is lifted to the least of those
  that wait, or, if none do, to that of the tenant that waited last. So is that of one that was never here.
* So a counter that is no higher than this need not be remembered. When more than `MAX_IDLE_TENANTS` have nothing waiting, the
  half of them with the least counters is forgotten.

So of two tenants that wait all the time, neither gets more than the other by more than one prompt and what its requests
under way may still be given; however many requests either of them sends.
"""

from __future__ import annotations

from heapq import nsmallest

OUTPUT_WEIGHT = 2.0  # beside a prompt token: computed alone, in a step of its own
MAX_IDLE_TENANTS = 10_000

Tenant = str | None  # None: nobody in particular


class FairShare:
    """Of one front end."""

    def __init__(self, max_idle_tenants: int = MAX_IDLE_TENANTS) -> None:
        self._max_idle_tenants = max_idle_tenants
        self._served: dict[Tenant, float] = {}
        self._waiting: set[Tenant] = set()
        self._last_waited = 0.0

    def served(self, tenant: Tenant) -> float:
        served = self._served.get(tenant)
        return self._least if served is None else served

    @property
    def _least(self) -> float:
        """Where whoever is not known begins. It never falls."""
        return min(map(self._served.__getitem__, self._waiting)) if self._waiting else self._last_waited

    def begin_waiting(self, tenant: Tenant) -> None:
        """It had nothing waiting so far."""
        self._served[tenant] = max(self.served(tenant), self._least)
        self._waiting.add(tenant)

    def end_waiting(self, tenant: Tenant) -> None:
        self._last_waited = self.served(tenant)
        self._waiting.discard(tenant)
        self._forget()

    def on_dispatch(self, tenant: Tenant, num_prompt_tokens: int) -> None:
        self._served[tenant] = self.served(tenant) + num_prompt_tokens

    def on_tokens(self, tenant: Tenant, number: int) -> None:
        self._served[tenant] = self.served(tenant) + OUTPUT_WEIGHT * number
        self._forget()

    def _forget(self) -> None:
        num_idle = len(self._served) - len(self._waiting)
        if num_idle > self._max_idle_tenants:
            idle = self._served.keys() - self._waiting
            for tenant in nsmallest(num_idle - self._max_idle_tenants // 2, idle, key=self._served.__getitem__):
                del self._served[tenant]

    def check_invariants(self) -> None:
        assert self._waiting <= self._served.keys()
        assert len(self._served) - len(self._waiting) <= self._max_idle_tenants

"""Whose turn it is, by the tokens that each tenant was served: a virtual token counter for each. Pure.

Rules
-----
* A tenant's counter grows by the prompt tokens that are dispatched for it, and by `OUTPUT_WEIGHT` for each token that it gets.
* Of those that wait, the tenant with the least counter is next.
* Who comes back after it had nothing waiting does not keep what it did not use: its counter is lifted to the least of those
  that wait, or, if none do, to that of the tenant that waited last.

So of two tenants that wait all the time, neither gets more than the other by more than one prompt and what its requests
under way may still be given; however many requests either of them sends.
"""

from __future__ import annotations

from collections.abc import Collection

OUTPUT_WEIGHT = 2.0  # beside a prompt token: computed alone, in a step of its own

Tenant = str | None  # None: nobody in particular


class FairShare:
    """Of one front end."""

    def __init__(self) -> None:
        self._served: dict[Tenant, float] = {}
        self._last_waited = 0.0

    def served(self, tenant: Tenant) -> float:
        return self._served.get(tenant, 0.0)

    def begin_waiting(self, tenant: Tenant, others: Collection[Tenant]) -> None:
        """It had nothing waiting so far; `others` have."""
        least = min(map(self.served, others)) if others else self._last_waited
        self._served[tenant] = max(self.served(tenant), least)

    def end_waiting(self, tenant: Tenant) -> None:
        self._last_waited = self.served(tenant)

    def on_dispatch(self, tenant: Tenant, num_prompt_tokens: int) -> None:
        self._served[tenant] = self.served(tenant) + num_prompt_tokens

    def on_tokens(self, tenant: Tenant, number: int) -> None:
        self._served[tenant] = self.served(tenant) + OUTPUT_WEIGHT * number

"""How often something that dies may begin again, and how long to wait before each time. Pure: `now` comes in."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
MAX_DELAY_S = 30.0


class RestartBudget:
    """At most `max_restarts` within ten minutes; the wait doubles with each one that these remember, up to `MAX_DELAY_S`."""

    def __init__(self, max_restarts: int, first_delay_s: float) -> None:
        self._max_restarts = max_restarts
        self._first_delay_s = first_delay_s
        self._recent_s: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """One restart: how long to wait before it. None if there is none left."""
        while self._recent_s and self._recent_s[0] <= now - WINDOW_S:
            self._recent_s.popleft()
        if len(self._recent_s) >= self._max_restarts:
            return None
        self._recent_s.append(now)
        # Bounded in the exponent, too: whoever allows thousands of restarts must not meet a number that is none.
        return min(MAX_DELAY_S, self._first_delay_s * 2.0 ** min(len(self._recent_s) - 1, 30))

    def take_free(self) -> float | None:
        """One that is not counted, as whatever died is not to blame. None where nothing may begin again."""
        return self._first_delay_s if self._max_restarts else None

    def check_invariants(self) -> None:
        assert len(self._recent_s) <= self._max_restarts
        assert list(self._recent_s) == sorted(self._recent_s)

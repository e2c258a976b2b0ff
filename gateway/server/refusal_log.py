"""Which refusals of requests get a line in the log. Pure: `now` comes in.

An endpoint that drains or is full refuses every request that clients and proxies try again; one with keys refuses a board that
was left open with another one. For each of these causes: one line, then how many more.
"""

from __future__ import annotations

INTERVAL_S = 10.0


class RefusalLog:
    def __init__(self) -> None:
        self._told_s: float | None = None
        self._num_untold = 0

    def note(self, now: float) -> int | None:
        """A request is refused: how many were since the last line, or None where it gets no line."""
        if self._told_s is not None and now - self._told_s < INTERVAL_S:
            self._num_untold += 1
            return None
        num_untold, self._num_untold, self._told_s = self._num_untold, 0, now
        return num_untold

"""Where a text that comes in pieces must end. Knows no tokens.

Rules
-----
* The text ends at the first stop string to be completed, whatever the pieces; of several completed by the same character, the
  longest counts.
* Only a suffix that could begin a stop string is held back.
* Text that came while the matcher was not armed ends nothing by itself, but a stop string may begin in it.
"""

from __future__ import annotations


class StopStringMatcher:
    """`held` is the text that has come and is not released: the longest suffix that is a proper prefix of a stop string."""

    __slots__ = ("_include", "_stops", "held")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        self._stops = stops
        self._include = include_in_output
        self.held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """The text to release, and the stop string if one ended it. Not to be called again after that."""
        window = self.held + text
        found = self._first_completed(window, len(self.held)) if armed else None
        if found is not None:
            start, stop = found
            self.held = ""
            return window[: start + len(stop) if self._include else start], stop
        cut = self._hold_from(window)
        self.held = window[cut:]
        return window[:cut], None

    def take_held(self) -> str:
        """The text ends here for another reason: what was held back began no stop string."""
        held, self.held = self.held, ""
        return held

    def _first_completed(self, window: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends behind the first `num_old` characters."""
        best: tuple[int, int, str] | None = None  # (end, start, stop): the smallest is the earliest, then the longest
        for stop in self._stops:
            start = window.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None else min(best, match)
        return None if best is None else best[1:]

    def _hold_from(self, window: str) -> int:
        cut = len(window)
        for stop in self._stops:
            start = window.find(stop[0], max(0, len(window) + 1 - len(stop)))
            while 0 <= start < cut and not stop.startswith(window[start:]):
                start = window.find(stop[0], start + 1)
            if 0 <= start < cut:
                cut = start
        return cut

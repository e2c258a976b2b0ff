"""How late the event loop runs what is due: the number that says whether a front end keeps up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

INTERVAL_S = 0.1
WINDOW = 50  # readings: five seconds


class LoopLag:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lags_s: deque[float] = deque(maxlen=WINDOW)
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    @property
    def worst_ms(self) -> float:
        """Of the last five seconds."""
        return round(1000 * max(self._lags_s, default=0.0), 2)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = self._clock() + INTERVAL_S

        def on_time() -> None:
            self._lags_s.append(max(0.0, self._clock() - due_s))
            self._schedule(loop)

        self._handle = loop.call_later(INTERVAL_S, on_time)

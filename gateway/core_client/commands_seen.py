"""Which of our commands a life of a rank has seen. Pure: time is an argument.

The engine notices a lost command by the number of the next one (`cores/gaps.py`). Where none follows, nobody would: the engine
has no work, and the front end waits. So a command that is not seen after a second is followed by one that asks for nothing.
"""

from __future__ import annotations

ASK_AFTER_S = 1.0


class CommandsSeen:
    def __init__(self, seq: int) -> None:
        self._seen = self._awaited = seq
        self._since_s = 0.0

    def on_report(self, seq: int) -> None:
        self._seen = max(self._seen, seq)

    def is_time_to_ask(self, last_seq: int, now: float) -> bool:
        """`last_seq`: of the commands sent. At most once in `ASK_AFTER_S`."""
        if self._seen >= self._awaited:
            self._awaited, self._since_s = last_seq, now
            return False
        if now - self._since_s < ASK_AFTER_S:
            return False
        self._since_s = now
        return True

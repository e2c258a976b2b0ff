"""Frames on their way to one front end that ZMQ has not taken yet, bounded in bytes. Knows no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
OVERFLOW_STEP_BYTES = 1024 * 1024


class OutputBacklog:
    """Nothing that was put in is ever dropped: above the bound the engine stops making more."""

    def __init__(self, max_bytes: int = MAX_BACKLOG_BYTES) -> None:
        self.num_bytes = 0
        self._frames: deque[bytes] = deque()
        self._max_bytes = max_bytes
        self._alarm_bytes = max_bytes

    @property
    def is_empty(self) -> bool:
        return not self._frames

    def put(self, frame: bytes) -> bool:
        """True when the backlog has become too long: whoever still makes outputs for this front end must end them now."""
        self._frames.append(frame)
        self.num_bytes += len(frame)
        if self.num_bytes <= self._alarm_bytes:
            return False
        # The final outputs of what is ended come on top. Requests that come after that are worth another alarm.
        self._alarm_bytes = self.num_bytes + OVERFLOW_STEP_BYTES
        return True

    def flush(self, send: Callable[[bytes], bool]) -> None:
        """Sends in order until `send` says that it took nothing."""
        while self._frames and send(self._frames[0]):
            self.num_bytes -= len(self._frames.popleft())
        if not self._frames:
            self._alarm_bytes = self._max_bytes

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(map(len, self._frames))
        assert self._alarm_bytes >= self._max_bytes

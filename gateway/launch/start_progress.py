"""One line at the bottom of a terminal that says how far the start is. Log lines go above it; a pipe never sees it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from cores.control_messages import GroupState

INTERVAL_S = 0.25
BAR_WIDTH = 20
_ERASE = "\r\x1b[K"


class BottomLine(io.TextIOBase):
    """Stands before a terminal: whole lines that are written go above the line that is shown. For several threads."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._text = ""
        self._is_at_start = True  # of a line, where ours may stand
        self._lock = threading.RLock()
        self.bar = "█░" if (out.encoding or "").lower().startswith("utf") else "#."

    def show(self, text: str) -> None:
        """Empty: nothing."""
        with self._lock:
            if self._is_at_start and (text or self._text):
                width = _width(self._out)
                self._out.write(_ERASE + text[: width - 1])
                self._out.flush()
            self._text = text

    def write(self, text: str) -> int:
        with self._lock:
            if not text:
                return 0
            self._out.write((_ERASE if self._text and self._is_at_start else "") + text)
            self._is_at_start = text.endswith("\n")
            if self._text and self._is_at_start:
                self._out.write(self._text[: _width(self._out) - 1])
            self._out.flush()
            return len(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._out.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a read-only one is all that anybody needs
        return self._out.encoding


class NoLine:
    """Where there is no terminal, or somebody parses the log."""

    bar = "#."

    def show(self, text: str) -> None:
        pass


StartLine = BottomLine | NoLine


def _width(out: TextIO) -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size(out.fileno()).columns or 80
    return 80


@contextlib.contextmanager
def bottom_line(*, is_wanted: bool) -> Iterator[StartLine]:
    """Takes the place of stderr meanwhile, where that is a terminal."""
    if not is_wanted or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield NoLine()
        return
    line = BottomLine(sys.stderr)
    with contextlib.redirect_stderr(line):
        try:
            yield line
        finally:
            line.show("")


class Starting(Protocol):
    """Whose start it is: the launcher's."""

    @property
    def group(self) -> GroupState: ...

    @property
    def is_starting(self) -> bool: ...


async def show_start(line: StartLine, starting: Starting, what: str) -> None:
    """Until the start is over, however it ends."""
    began_s = time.monotonic()
    try:
        while starting.is_starting:
            line.show(start_text(starting.group, time.monotonic() - began_s, what, line.bar))
            await asyncio.sleep(INTERVAL_S)
    finally:
        line.show("")


def start_text(group: GroupState, elapsed_s: float, what: str, bar: str = "█░") -> str:
    """`starting smollm2  2/4 ranks ready  weights ██████░░░░  63%  12s`"""
    ready = [rank.state == "ready" for rank in group.ranks]
    # A rank that is ready has all of its weights, whether it ever said how far it was or not.
    progress = sum(1.0 if rank.state == "ready" else rank.start_progress for rank in group.ranks) / max(1, len(ready))
    filled = round(BAR_WIDTH * progress)
    noun = "rank" if len(ready) == 1 else "ranks"
    full, empty = bar[0], bar[1]
    weights = full * filled + empty * (BAR_WIDTH - filled)
    return f"starting {what}  {sum(ready)}/{len(ready)} {noun} ready  weights {weights} {progress:>4.0%}  {elapsed_s:.0f}s"

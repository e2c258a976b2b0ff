"""In the place of stderr: whoever writes to the log never waits for whoever reads it.

A pipe that nobody reads is full after 64 kB, and a terminal stands still after Ctrl-S. Whoever writes then hangs; and an event
loop that has to say every so often that it lives would be taken for dead because of its log. So a thread writes. What it cannot
get rid of in time is lost, counted, and said.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

MAX_WAITING_CHARS = 1024 * 1024
LAST_WORDS_S = 2.0  # what waits when the process ends


class LogQueue(io.TextIOBase):
    """Writes to `fd`. For several threads."""

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        self._fd = fd
        self._encoding = encoding
        self._waiting: list[str] = []
        self._num_chars = 0
        self._num_lost = 0  # lines, since the thread last took what waited
        self._is_written = True  # all of it
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        with self._changed:
            # Where a line is missing, so are all until the thread comes back: a log with one hole can be read.
            if self._num_lost or self._num_chars + len(text) > MAX_WAITING_CHARS:
                self._num_lost += max(1, text.count("\n"))
            else:
                self._waiting.append(text)
                self._num_chars += len(text)
                self._is_written = False
                self._changed.notify_all()
        return len(text)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_written = not self._waiting
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                texts, num_lost = self._waiting, self._num_lost
                self._waiting, self._num_chars, self._num_lost = [], 0, 0
            data = memoryview("".join(texts).encode(self._encoding, errors="backslashreplace"))
            # Not through `sys.stderr`: a daemon thread that hangs with its lock is a fatal error when the interpreter ends.
            with contextlib.suppress(OSError):  # nobody will ever read it
                while data:
                    data = data[os.write(self._fd, data) :]
            if num_lost:
                logger.warning("whoever reads this log was too slow; lines that are missing before this one: %d", num_lost)

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything is written. False when it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_written, timeout_s)

    def flush(self) -> None:
        """Logging asks for it after each line: nobody is to wait."""

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a read-only one is all that anybody needs
        return self._encoding


def unblock_stderr() -> None:
    """Once, at the beginning of a program."""
    stderr = sys.__stderr__
    if stderr is None or sys.stderr is not stderr:
        return  # somebody collects it, as tests do
    sys.stderr = LogQueue(stderr.fileno(), stderr.encoding)
    atexit.register(drain_stderr)


def drain_stderr() -> None:
    """Where it is a `LogQueue`: gives what waits there its time."""
    if isinstance(sys.stderr, LogQueue):
        sys.stderr.drain(LAST_WORDS_S)

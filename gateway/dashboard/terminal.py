"""The terminal: raw keys in, frames out, and everything as it was afterwards. Knows nothing of what is shown."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import tty
from typing import Any, TextIO

from rich.console import Console, RenderableType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, no cursor, nothing on it
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"


class Terminal:
    """Use it as a context manager. Without a keyboard (stdin is no terminal) it only shows."""

    def __init__(self, console: Console, stdin: TextIO = sys.stdin) -> None:
        self._console = console
        self._out = console.file
        self._stdin = stdin
        self._before: list[Any] | None = None  # the keyboard's settings
        self._shown: list[str] = []
        self._is_entered = False

    @property
    def has_keyboard(self) -> bool:
        return self._stdin.isatty()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines. Asked for each frame: a window may have changed."""
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self._out.fileno())
            if size.columns > 0 and size.lines > 0:
                return size.columns, size.lines
        return self._console.size.width, self._console.size.height

    def enter(self) -> None:
        """Idempotent, as `leave` is."""
        if self._is_entered:
            return
        self._is_entered = True
        if self.has_keyboard:
            fd = self._stdin.fileno()
            self._before = termios.tcgetattr(fd)
            tty.setcbreak(fd)
            settings = termios.tcgetattr(fd)
            settings[0] &= ~termios.IXON  # ctrl-S would stop us in the middle of a frame, deaf to every signal
            termios.tcsetattr(fd, termios.TCSADRAIN, settings)
        self.forget()
        self._write(_ENTER)

    def leave(self) -> None:
        if not self._is_entered:
            return
        self._is_entered = False
        if self._before is not None:
            with contextlib.suppress(termios.error):  # the window is gone
                termios.tcsetattr(self._stdin.fileno(), termios.TCSADRAIN, self._before)
        self._write(_LEAVE)

    def __enter__(self) -> Terminal:
        self.enter()
        return self

    def __exit__(self, *_error: object) -> None:
        self.leave()

    def forget(self) -> None:
        """The next frame is written whole: nobody knows what is on the screen."""
        self._shown = []

    def show(self, frame: RenderableType, width: int) -> None:
        """Writes the lines that are others than before: little over a slow line, and nothing flickers."""
        with self._console.capture() as capture:
            self._console.print(frame, end="", crop=False, no_wrap=True, width=width)
        lines = capture.get().split("\n")[:-1]
        is_whole = len(lines) != len(self._shown)
        # Erased before it is written: after a line as wide as the window, an erasure would take its last character.
        changed = [
            f"\x1b[{number};1H\x1b[K{line}\x1b[0m"
            for number, line in enumerate(lines, 1)
            if is_whole or line != self._shown[number - 1]
        ]
        if changed:
            self._write(("\x1b[2J" if is_whole else "") + "".join(changed))
        self._shown = lines

    @property
    def keyboard_fd(self) -> int:
        return self._stdin.fileno()

    def read_keys(self) -> bytes:
        return os.read(self._stdin.fileno(), 1024)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the window is gone: a signal will tell
            self._out.write(text)
            self._out.flush()

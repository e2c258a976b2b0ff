"""From the bytes of a keyboard to names of keys. Knows no terminal."""

from __future__ import annotations

import re

_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[C": "right", "\x1bOC": "right",
    "\x1b[D": "left", "\x1bOD": "left", "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[H": "home", "\x1bOH": "home",
    "\x1b[1~": "home", "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end", "\x1bOP": "f1", "\x1b[11~": "f1",
    "\r": "enter", "\n": "enter", " ": "space", "\x7f": "backspace", "\x08": "backspace", "\x1b": "esc",
    "\x03": "ctrl-c", "\x04": "ctrl-d", "\x0c": "ctrl-l",
}  # fmt: skip
_SEQUENCE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O[@-~])")
_BEGUN = re.compile("\x1b(?:\\[[0-?]*[ -/]*|O)?$")


class KeyParser:
    """A sequence may come in pieces: over a slow line its first byte alone, which is also the escape key."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The keys that are whole. Sequences without a name of ours are dropped."""
        text, keys = self._rest + data.decode(errors="replace"), []
        self._rest = ""
        while text:
            if text[0] != "\x1b":
                keys.append(_NAMES.get(text[0], text[0]))
                text = text[1:]
            elif sequence := _SEQUENCE.match(text):
                keys += [_NAMES[sequence[0]]] if sequence[0] in _NAMES else []
                text = text[sequence.end() :]
            elif _BEGUN.match(text):
                self._rest = text
                break
            else:
                keys.append("esc")
                text = text[1:]
        return keys

    @property
    def is_waiting(self) -> bool:
        """For the rest of a sequence. When it does not come for a while, call `flush`."""
        return bool(self._rest)

    def flush(self) -> list[str]:
        """What was begun is no sequence after all."""
        rest, self._rest = self._rest, ""
        return [_NAMES.get(char, char) for char in rest]

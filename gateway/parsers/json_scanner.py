"""Where a JSON object ends in text that comes in pieces. Does not check what is inside it."""

from __future__ import annotations

import re
from enum import Enum

_OUTSIDE = re.compile(r"[^\sa-zA-Z0-9.,:+-]")  # brackets, a quote, or what no JSON has there
_INSIDE = re.compile(r'["\\]')


class Found(Enum):
    NOTHING = "nothing"  # yet
    END = "end"
    ERROR = "error"  # a character that cannot be there, as the first one of a marker


class JsonScanner:
    """Counts brackets outside strings."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, start: int, end_depth: int) -> tuple[Found, int]:
        """Goes on until brackets have closed down to `end_depth`. Also says where it stopped: behind the bracket, or in front
        of the error."""
        at = start
        if self._is_escaped and at < len(text):
            at, self._is_escaped = at + 1, False
        while match := (_INSIDE if self._is_in_string else _OUTSIDE).search(text, at):
            at = match.end()
            match match[0]:
                case '"':
                    self._is_in_string = not self._is_in_string
                case "\\" if self._is_in_string:
                    self._is_escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth == end_depth:
                        return Found.END, at
                case _:
                    return Found.ERROR, match.start()
        return Found.NOTHING, len(text)

"""Finding a marker in text that comes in pieces."""

from __future__ import annotations

WHITE_SPACE = " \t\r\n"


def split_at_marker(text: str, marker: str) -> tuple[str, str, str]:
    """(what is in front of it, the marker, the rest). The marker has with it the white space that stands in front.

    The marker is empty where there is none; the rest is then what may be the beginning of one.
    """
    before, found, rest = text.partition(marker)
    if not found:
        before = text.removesuffix(_longest_beginning(text, marker))
    shown = before.rstrip(WHITE_SPACE)
    return (shown, text[len(shown) : len(before)] + found, rest) if found else (shown, "", text[len(shown) :])


def _longest_beginning(text: str, marker: str) -> str:
    """The longest end of a text that a marker begins with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return marker[:length]
    return ""

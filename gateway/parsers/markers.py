"""Finding a marker in text that comes in pieces."""

from __future__ import annotations

WHITE_SPACE = " \t\r\n"


def split_at_marker(text: str, *markers: str) -> tuple[str, str, str]:
    """(what is in front of the first one, the marker, the rest). The marker has with it the white space that stands in front.

    The marker is empty where there is none; the rest is then what may be the beginning of one.
    """
    before, found, rest = find_marker(text, *markers)
    shown = before.rstrip(WHITE_SPACE)
    return (shown, text[len(shown) : len(before)] + found, rest) if found else (shown, "", text[len(shown) :])


def find_marker(text: str, *markers: str) -> tuple[str, str, str]:
    """The same with all white space left where it is."""
    places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if places:
        at, marker = min(places)
        return text[:at], marker, text[at + len(marker) :]
    at = len(text) - max(_num_begun(text, marker) for marker in markers)
    return text[:at], "", text[at:]


def _num_begun(text: str, marker: str) -> int:
    """The length of the longest end of a text that a marker begins with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

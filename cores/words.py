"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int | str, noun: str, plural: str | None = None) -> str:
    """1 request, 2 requests."""
    return f"{number} " + (noun if str(number) == "1" else plural or f"{noun}s")

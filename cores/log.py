"""Logging of every process of the gateway: to stderr, one format. Called once by each program's main function."""

from __future__ import annotations

import logging
import sys


def is_worth_a_line(count: int) -> bool:
    """For what a broken peer can repeat without end: its 1st, 2nd, 4th, 8th time, so that a flood does not fill the disk."""
    return count & (count - 1) == 0


def set_up_logging(level: str = "info") -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for chatty in ("asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)

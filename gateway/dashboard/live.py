"""Keeps a frame fresh on a console until it is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from gateway.dashboard.feed import Reading, StatusFeed
from gateway.dashboard.view import render


def show(console: Console, readings: Sequence[Reading]) -> None:
    """One frame."""
    console.print(render(readings, console.width, ascii_only=console.options.ascii_only))


async def watch(console: Console, feed: StatusFeed, interval_s: float, latest: list[Reading]) -> None:
    """Until cancelled. `latest` always holds the readings of the last frame. A pipe gets frame after frame."""
    if not console.is_terminal:
        while True:
            latest[:] = await feed.read()
            show(console, latest)
            await asyncio.sleep(interval_s)
    # No refresh thread of its own: a frame is drawn when there is something new.
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            latest[:] = await feed.read()
            frame = render(latest, console.width, ascii_only=console.options.ascii_only)
            live.update(frame, refresh=True)
            await asyncio.sleep(interval_s)

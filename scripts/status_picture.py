"""Pictures of the board as SVG.

`python -m scripts.status_picture docs/screens` draws made-up groups at several sizes; `… OUT.svg URL [SECONDS]` watches a real
endpoint for some seconds and draws what it has seen.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
import time
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from gateway.dashboard.board import Board
from gateway.dashboard.feed import StatusFeed
from gateway.dashboard.lines import Frame
from gateway.dashboard.live import read_all
from gateway.dashboard.state import ViewState
from gateway.dashboard.view import render
from scripts.board_scenes import board_at, roles

SIZES = ((80, 24), (120, 40), (200, 60))
NUM_RANKS = (2, 8, 64)
SCENE_S = 72.0


class Words:
    """A frame in pieces that neither begin nor end with a blank: some viewers of SVG drop those, and all behind them moves."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in self._frame.__rich_console__(console, options):
            assert isinstance(segment, Segment)
            for text in re.findall(r"\n| +|[^ \n]+", segment.text):
                yield Segment(text, segment.style)


def save(board: Board, view: ViewState, now: float, out: Path) -> None:
    console = Console(
        record=True, width=view.width, height=view.height, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Words(render(board, view, now)), end="", crop=False, no_wrap=True)
    console.save_svg(str(out), title="gateway status")


def draw_scenes(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for num_ranks in NUM_RANKS:
        board = board_at(num_ranks, SCENE_S)
        for width, height in SIZES:
            view = ViewState(width=width, height=height, interval_s=0.5)
            save(board, view, SCENE_S, directory / f"{num_ranks}-ranks-{width}x{height}.svg")
    board = board_at(8, SCENE_S)
    for name, view in {
        "detail": ViewState(width=120, height=40, page="detail", selected=(0, roles(8)["dead"]), interval_s=0.5),
        "help": ViewState(width=80, height=24, page="help", interval_s=0.5),
    }.items():
        save(board, view, SCENE_S, directory / f"{name}-{view.width}x{view.height}.svg")


async def watch(url: str, seconds: float) -> Board:
    feed = StatusFeed([url])
    board = Board(feed.urls)
    end_s = time.monotonic() + seconds
    async with feed:
        while True:
            await read_all(feed, board)
            if time.monotonic() >= end_s:
                return board
            await asyncio.sleep(0.5)


def main() -> None:
    if len(sys.argv) == 2:
        draw_scenes(Path(sys.argv[1]))
        return
    out, url, *seconds = sys.argv[1:]
    board = asyncio.run(watch(url, float(seconds[0]) if seconds else 60.0))
    save(board, ViewState(width=120, height=28, interval_s=0.5), time.monotonic(), Path(out))


if __name__ == "__main__":
    main()

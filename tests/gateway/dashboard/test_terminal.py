"""What the board writes, as a terminal shows it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from io import StringIO

import pyte
import pytest
from rich.console import Console

from gateway.dashboard.board import Board
from gateway.dashboard.feed import Reading, StatusFeed
from gateway.dashboard.live import LiveBoard
from gateway.dashboard.state import ViewState, press
from gateway.dashboard.terminal import Terminal
from gateway.dashboard.view import render
from gateway.status import Event, RankStatus, StatusSnapshot
from scripts.board_scenes import board_at

NOW = 72.0
# Board, detail, events, help, and back to the board.
KEYS = ["j", "enter", "e", "?", "?", "s", "enter", "?", "e", "esc", "esc"]


def wide_board() -> Board:
    """Two cells a character, wherever the text is a server's."""
    text = "模型的權重無法載入" * 12
    ranks = (
        RankStatus(rank=0, epoch=1, state="ready", running=6, generation_tokens_per_s=164, step_ms=30.1),
        RankStatus(rank=1, epoch=2, state="dead", last_death_s_ago=12.0, death_cause=text),
    )
    events = tuple(Event(seq=i, age_s=90 - i, kind="death", rank=i % 2, text="x" * (i % 2) + text) for i in range(30))
    board = Board(["http://h:8000"])
    status = StatusSnapshot(
        version="0.1.0", mode="DPLBAsyncMPClient", model=text, uptime_s=754.0, state="degraded", ranks=ranks, events=events
    )  # fmt: skip
    board.note(0, Reading("http://h:8000", status), NOW)
    return board


class Window:
    """A board's terminal, with an emulator that reads every character written to it."""

    def __init__(self, board: Board, view: ViewState, color: str | None) -> None:
        self._board = board
        self._color = color
        self._written = StringIO()
        console = Console(
            file=self._written, width=view.width, force_terminal=color is not None, color_system=color, legacy_windows=False
        )  # type: ignore[call-overload]  # rich's Literal
        self._terminal = Terminal(console, stdin=StringIO())
        self._screen = pyte.Screen(view.width, view.height)
        self.view = view
        self._terminal.enter()
        self.show()

    def show(self) -> None:
        self._terminal.show(render(self._board, self.view, NOW), self.view.width)
        pyte.Stream(self._screen).feed(self._written.getvalue())
        self._written.seek(0)
        self._written.truncate()

    def press(self, key: str) -> None:
        view = press(self.view, key, self._board, NOW)
        assert view is not None
        self.view = view
        self.show()

    def resize(self, width: int, height: int) -> None:
        self._screen.resize(height, width)
        self.view = dataclasses.replace(self.view, width=width, height=height)
        self._terminal.forget()
        self.show()

    def check(self) -> None:
        """Line by line the frame's text, and each cell, its colours too, as on a terminal that never showed another frame."""
        plain = StringIO()
        frame = render(self._board, self.view, NOW)
        Console(file=plain, width=self.view.width, color_system=None).print(frame, end="", no_wrap=True, crop=False)
        expected = [line.rstrip() for line in plain.getvalue().split("\n")[:-1]]
        assert [line.rstrip() for line in self._screen.display] == expected
        fresh = Window(self._board, self.view, self._color)
        assert [self._cells(y) for y in range(len(expected))] == [fresh._cells(y) for y in range(len(expected))]

    def _cells(self, y: int) -> list[pyte.screens.Char]:
        return [self._screen.buffer[y][x] for x in range(self.view.width)]


@pytest.mark.parametrize("color", [None, "256"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_nothing_of_the_page_before_stays_on_the_screen(size: tuple[int, int], color: str | None, is_wide: bool) -> None:
    width, height = size
    board = wide_board() if is_wide else board_at(2, NOW, history_s=2)
    window = Window(board, ViewState(width=width, height=height), color)
    window.check()
    for key in KEYS:
        window.press(key)
        window.check()


@pytest.mark.parametrize("is_wide", [False, True])
def test_nothing_of_the_page_before_stays_when_the_window_is_resized(is_wide: bool) -> None:
    board = wide_board() if is_wide else board_at(2, NOW, history_s=2)
    window = Window(board, ViewState(width=80, height=24), "256")
    for key, size in zip(KEYS, [(120, 40), (79, 24), (40, 10), (121, 24)], strict=False):
        window.press(key)
        window.resize(*size)
        window.check()


async def test_a_window_that_is_made_smaller_and_larger_again_before_the_board_looks_is_painted_anew() -> None:
    written, screen = StringIO(), pyte.Screen(80, 24)
    console = Console(file=written, width=80, height=24, force_terminal=True, color_system=None, legacy_windows=False)

    async def until_it_says(words: str) -> None:
        async with asyncio.timeout(60):
            while words not in screen.display[0]:
                await asyncio.sleep(0.01)
                pyte.Stream(screen).feed(written.getvalue())
                written.seek(0)
                written.truncate()

    feed = StatusFeed(["http://127.0.0.1:1"])
    async with feed:
        board = LiveBoard(Terminal(console, stdin=StringIO()), feed, 3600.0, Board(feed.urls), ascii_only=False)
        running = asyncio.create_task(board.run())
        await until_it_says("never seen")
        screen.resize(10, 20)
        screen.resize(24, 80)
        assert "never seen" not in screen.display[0]
        os.kill(os.getpid(), signal.SIGWINCH)
        await until_it_says("never seen")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == signal.SIGTERM

"""Keeps the board fresh: asks, listens to keyboard and signals, shows what `view` draws. The only part with a clock."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from gateway.dashboard.board import Board
from gateway.dashboard.feed import StatusFeed
from gateway.dashboard.keys import KeyParser
from gateway.dashboard.state import ViewState, press
from gateway.dashboard.terminal import Terminal
from gateway.dashboard.view import render

ESCAPE_S = 0.05  # after which the first byte of a sequence was the escape key
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def show(console: Console, board: Board, *, ascii_only: bool, now: float, is_once: bool = False) -> None:
    """One frame, as long as it gets."""
    view = ViewState(width=console.width, ascii_only=ascii_only, is_once=is_once)
    console.print(render(board, view, now), end="", no_wrap=True, crop=False)


async def follow(console: Console, feed: StatusFeed, interval_s: float, board: Board, *, ascii_only: bool) -> None:
    """For a pipe or a file: frame after frame, until cancelled."""
    while True:
        await read_all(feed, board)
        show(console, board, ascii_only=ascii_only, now=time.monotonic())
        console.file.write("\n")
        console.file.flush()
        await asyncio.sleep(interval_s)


async def read_all(feed: StatusFeed, board: Board) -> None:
    for index, reading in enumerate(await feed.read_all()):
        board.note(index, reading, time.monotonic())


class LiveBoard:
    """On a terminal, until the viewer leaves or a signal ends it."""

    def __init__(
        self,
        terminal: Terminal,
        feed: StatusFeed,
        interval_s: float,
        board: Board,
        *,
        ascii_only: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal
        self._feed = feed
        self._board = board
        self._clock = clock
        width, height = terminal.size
        self._view = ViewState(width=width, height=height, ascii_only=ascii_only, interval_s=interval_s)
        self._keys = KeyParser()
        self._escape: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Returns the number of the signal that ended it, 0 when the viewer left."""
        # One that does not answer must not hold up what the others say.
        tasks = [asyncio.create_task(self._ask(index)) for index in range(len(self._feed.urls))]
        tasks.append(asyncio.create_task(self._show_for_ever()))
        with self._terminal, self._signals(), self._keyboard():
            try:
                first: list[asyncio.Future[Any]] = [*tasks, self._ended]
                done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()  # an error of ours is told once the terminal is as it was
            finally:
                for task in tasks:
                    task.cancel()
                if self._escape is not None:
                    self._escape.cancel()
        return self._ended.result()

    async def _ask(self, index: int) -> None:
        is_first = True
        while True:
            if self._view.paused_s is None:
                self._board.endpoints[index].asked_s = self._clock()
                self._board.note(index, await self._feed.read(index), self._clock())
                if is_first:
                    self._show()
                is_first = False
            await asyncio.sleep(self._view.interval_s)

    async def _show_for_ever(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(self._view.interval_s)

    def _show(self) -> None:
        width, height = self._terminal.size
        if (width, height) != (self._view.width, self._view.height):
            self._view = dataclasses.replace(self._view, width=width, height=height)
            self._terminal.forget()
        self._terminal.show(render(self._board, self._view, self._clock()), width)

    # --- keys ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _keyboard(self) -> Iterator[None]:
        if not self._terminal.has_keyboard:
            yield
            return
        loop, fd = asyncio.get_running_loop(), self._terminal.keyboard_fd
        loop.add_reader(fd, self._on_input)
        try:
            yield
        finally:
            loop.remove_reader(fd)

    def _on_input(self) -> None:
        try:
            data = self._terminal.read_keys()
        except OSError:
            data = b""
        if not data:  # the window is gone
            self._end(signal.SIGHUP)
            return
        if self._escape is not None:
            self._escape.cancel()
        self._press(self._keys.feed(data))
        if self._keys.is_waiting:
            self._escape = asyncio.get_running_loop().call_later(ESCAPE_S, lambda: self._press(self._keys.flush()))

    def _press(self, keys: list[str]) -> None:
        for key in keys:
            if key == "ctrl-l":
                self._terminal.forget()
            view = press(self._view, key, self._board, self._clock())
            if view is None:
                self._end(0)
                return
            self._view = view
        if keys:
            self._show()

    # --- signals ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in ENDING_SIGNALS:
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGINT, self._end, 0)
        loop.add_signal_handler(signal.SIGWINCH, self._on_resize)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        try:
            yield
        finally:
            for number in (*ENDING_SIGNALS, signal.SIGINT, signal.SIGWINCH, signal.SIGTSTP):
                loop.remove_signal_handler(number)

    def _on_resize(self) -> None:
        """Also one that was undone before we looked has cost the window what it showed."""
        self._terminal.forget()
        self._show()

    def _end(self, number: int) -> None:
        if not self._ended.done():
            self._ended.set_result(number)

    def _stop(self) -> None:
        """Ctrl-Z: the shell gets its terminal as it was, and we come back to ours with `fg`."""
        loop = asyncio.get_running_loop()
        self._terminal.leave()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when we are continued
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._terminal.enter()
        self._show()

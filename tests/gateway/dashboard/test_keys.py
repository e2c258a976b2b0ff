"""Keys, as terminals send them, and what they do."""

from __future__ import annotations

import dataclasses

import pytest

from gateway.dashboard.board import Board
from gateway.dashboard.keys import KeyParser
from gateway.dashboard.state import SORTS, ViewState, by_node, press
from scripts.board_scenes import board_at

SCENE_S = 72.0


def test_sequences_are_keys_and_unknown_ones_are_dropped() -> None:
    parser = KeyParser()
    assert parser.feed(b"q\x1b[A\x1bOB\x1b[5~\x1b[1;5C?\r \x7f") == [
        "q",
        "up",
        "down",
        "pageup",
        "?",
        "enter",
        "space",
        "backspace",
    ]
    assert not parser.is_waiting


def test_a_sequence_that_comes_in_pieces_is_one_key_and_the_escape_key_another() -> None:
    parser = KeyParser()
    assert parser.feed(b"\x1b") == []
    assert parser.is_waiting
    assert parser.feed(b"[") == []
    assert parser.feed(b"A") == ["up"]
    assert parser.feed(b"\x1b") == []
    assert parser.flush() == ["esc"]
    assert parser.feed(b"\x1bq") == ["esc", "q"]
    assert parser.flush() == []


def test_bytes_that_are_no_text_are_no_trouble() -> None:
    assert KeyParser().feed(b"\xff\xfe") == ["\ufffd", "\ufffd"]


@pytest.fixture
def board() -> Board:
    return board_at(8, SCENE_S, history_s=1)


def pressed(board: Board, *keys: str) -> ViewState | None:
    view: ViewState | None = ViewState(width=80, height=24)
    for key in keys:
        assert view is not None
        view = press(view, key, board, 5.0)
    return view


@pytest.mark.parametrize("key", ["q", "ctrl-c", "ctrl-d"])
def test_the_viewer_can_leave_from_every_page(board: Board, key: str) -> None:
    for way in ([], ["?"], ["e"], ["enter"], ["p"]):
        assert pressed(board, *way, key) is None


def test_pages_open_and_close(board: Board) -> None:
    assert pressed(board, "?").page == "help"  # type: ignore[union-attr]
    assert pressed(board, "?", "?").page == "board"  # type: ignore[union-attr]
    assert pressed(board, "e").page == "events"  # type: ignore[union-attr]
    assert pressed(board, "e", "esc").page == "board"  # type: ignore[union-attr]
    assert pressed(board, "enter").page == "detail"  # type: ignore[union-attr]
    assert pressed(board, "enter", "esc").page == "board"  # type: ignore[union-attr]


def test_selection_follows_the_order_on_the_screen_and_stops_at_its_ends(board: Board) -> None:
    names = [key for _, rows in by_node(board, ViewState(width=80)) for key, _ in rows]
    assert pressed(board, "j").selected == names[0]  # type: ignore[union-attr]
    assert pressed(board, "k").selected == names[-1]  # type: ignore[union-attr]
    assert pressed(board, "j", "down", "j").selected == names[2]  # type: ignore[union-attr]
    assert pressed(board, "end", "j").selected == names[-1]  # type: ignore[union-attr]
    assert pressed(board, "end", "home", "up").selected == names[0]  # type: ignore[union-attr]
    assert pressed(board, "j", "pagedown").selected == names[-1]  # type: ignore[union-attr]
    assert pressed(board, "j", "esc").selected is None  # type: ignore[union-attr]
    assert pressed(board, "enter").selected == names[0]  # type: ignore[union-attr]


def test_a_rank_stays_selected_when_the_order_changes(board: Board) -> None:
    assert pressed(board, "j", "s", "s", "r").selected == pressed(board, "j").selected  # type: ignore[union-attr]


def test_orders_come_one_after_the_other_and_back(board: Board) -> None:
    view = pressed(board, *["s"] * len(SORTS))
    assert view == ViewState(width=80, height=24)
    assert pressed(board, "s", "S") == view
    assert pressed(board, "r").reverse  # type: ignore[union-attr]


def test_pause_and_go_on(board: Board) -> None:
    assert pressed(board, "p").paused_s == 5.0  # type: ignore[union-attr]
    assert pressed(board, "p", "space").paused_s is None  # type: ignore[union-attr]


def test_events_scroll(board: Board) -> None:
    assert pressed(board, "e", "j", "j", "k").scroll == 1  # type: ignore[union-attr]
    assert pressed(board, "e", "k").scroll == 0  # type: ignore[union-attr]
    assert pressed(board, "e", "pagedown", "home").scroll == 0  # type: ignore[union-attr]


def test_keys_do_no_harm_while_nothing_is_known() -> None:
    view = ViewState(width=80, height=24)
    for key in ("j", "enter", "end", "x", "e", "up"):
        assert press(view, key, Board(["http://h"]), 0.0) in (view, dataclasses.replace(view, page="events"))

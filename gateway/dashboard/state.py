"""What the viewer has chosen, and what a key makes of it. Knows no console."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gateway.dashboard.board import Board, RankKey
from gateway.status import RankStatus

Page = Literal["board", "detail", "events", "help"]
# Where somebody should look, worst first. What an operator or a start brought about is no trouble, and sorting it up would move
# every row while a group starts.
TROUBLE = {"dead": 0, "stalled": 1, "suspect": 2, "restarting": 3, "draining": 4}
NO_TROUBLE = 9
TROUBLE_GROUP = "trouble"  # where ranks are grouped by node: those in trouble, of all nodes


def trouble(rank: RankStatus) -> int:
    return TROUBLE.get(rank.state, NO_TROUBLE)


# The largest first, but for the first two.
SORTS: dict[str, Callable[[RankStatus], float]] = {
    "trouble": trouble,
    "rank": lambda rank: 0,
    "waiting": lambda rank: -rank.waiting,
    "running": lambda rank: -rank.running,
    "kv cache": lambda rank: -rank.kv_cache_usage,
    "tok/s": lambda rank: -rank.generation_tokens_per_s,
    "step": lambda rank: -rank.step_ms,
    "restarts": lambda rank: -rank.restarts,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """`height` None: everything there is, for a file or a pipe."""

    width: int
    height: int | None = None
    ascii_only: bool = False
    page: Page = "board"
    sort: str = "trouble"
    reverse: bool = False
    selected: RankKey | None = None
    paused_s: float | None = None  # since when
    scroll: int = 0  # of the events' page
    interval_s: float = 1.0
    is_once: bool = False  # nobody looks a second time


def _place(board: Board) -> Callable[[RankKey], tuple[int, int]]:
    """By number, as ranks of one group that have an endpoint each are named; by endpoint first where a name needs that."""
    return (lambda key: key) if board.has_name_clash() else (lambda key: (key[1], key[0]))


def in_order(board: Board, view: ViewState) -> list[tuple[RankKey, RankStatus]]:
    """Equal ones by number, so that rows move for a reason only."""
    key, place = SORTS[view.sort], _place(board)
    return sorted(board.ranks, key=lambda row: (key(row[1]), place(row[0])), reverse=view.reverse)


def by_node(board: Board, view: ViewState) -> list[tuple[str, list[tuple[RankKey, RankStatus]]]]:
    """In order, under their nodes; one group without a name where there was never more than one, or the order is that of a
    number."""
    rows = in_order(board, view)
    if len(board.nodes) < 2 or view.sort not in ("trouble", "rank") or view.reverse:
        return [("", rows)]
    groups: dict[str, list[tuple[RankKey, RankStatus]]] = {}
    for key, rank in rows:
        is_trouble = view.sort == "trouble" and trouble(rank) != NO_TROUBLE
        groups.setdefault(TROUBLE_GROUP if is_trouble else f"node {rank.node or '?'}", []).append((key, rank))
    first = {TROUBLE_GROUP: groups.pop(TROUBLE_GROUP)} if TROUBLE_GROUP in groups else {}
    place = _place(board)
    return [*first.items(), *sorted(groups.items(), key=lambda group: place(group[1][0][0]))]


def press(view: ViewState, key: str, board: Board, now: float) -> ViewState | None:
    """The view after a key; None: the viewer leaves. Unknown keys do nothing."""
    match key:
        case "q" | "ctrl-c" | "ctrl-d":
            return None
        case "?" | "h" | "f1":
            return dataclasses.replace(view, page="board" if view.page == "help" else "help")
        case "e":
            return dataclasses.replace(view, page="board" if view.page == "events" else "events", scroll=0)
        case "p" | "space":
            return dataclasses.replace(view, paused_s=now if view.paused_s is None else None)
        case "s" | "S":
            names = list(SORTS)
            step = 1 if key == "s" else -1
            return dataclasses.replace(view, sort=names[(names.index(view.sort) + step) % len(names)])
        case "r":
            return dataclasses.replace(view, reverse=not view.reverse)
        case "enter" | "right" | "d" | "l":
            selected = view.selected or next((name for name, _ in _rows(board, view)), None)
            return view if selected is None else dataclasses.replace(view, selected=selected, page="detail")
        case "esc" | "left" | "backspace":
            if view.page == "board":
                return dataclasses.replace(view, selected=None)
            return dataclasses.replace(view, page="board")
        case "up" | "k" | "down" | "j" | "pageup" | "pagedown" | "home" | "end" | "g" | "G":
            return _scrolled(view, key) if view.page == "events" else _moved(view, key, board)
        case _:
            return view


PAGE = 10
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE}


def _rows(board: Board, view: ViewState) -> list[tuple[RankKey, RankStatus]]:
    return [row for _, rows in by_node(board, view) for row in rows]


def _moved(view: ViewState, key: str, board: Board) -> ViewState:
    names = [name for name, _ in _rows(board, view)]
    if not names:
        return view
    last = len(names) - 1
    if key in ("home", "g"):
        index = 0
    elif key in ("end", "G"):
        index = last
    elif view.selected not in names:
        index = last if key in ("up", "k") else 0
    else:
        index = min(last, max(0, names.index(view.selected) + _STEPS[key]))
    return dataclasses.replace(view, selected=names[index])


def _scrolled(view: ViewState, key: str) -> ViewState:
    """The page itself knows where the events end."""
    if key in ("home", "g"):
        return dataclasses.replace(view, scroll=0)
    if key in ("end", "G"):
        return dataclasses.replace(view, scroll=10**6)
    return dataclasses.replace(view, scroll=max(0, view.scroll + _STEPS[key]))

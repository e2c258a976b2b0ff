"""Draws the board: a pure function of what is known, what the viewer has chosen, and the time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.style import Style

from cores.words import counted
from gateway.dashboard.board import WINDOW_S, Board, Endpoint, RankKey
from gateway.dashboard.lines import (
    ALARM,
    BOLD,
    BOLD_RED,
    CYAN,
    DIM,
    PLAIN,
    RED,
    STATE_STYLES,
    YELLOW,
    Frame,
    Line,
)
from gateway.dashboard.pages import detail_lines, help_lines
from gateway.dashboard.rank_rows import RankTable, group_line
from gateway.dashboard.state import TROUBLE, ViewState, by_node
from gateway.dashboard.words import (
    ASCII,
    UNICODE,
    Glyphs,
    clean,
    count,
    duration,
    first_line,
    per_second,
    round_scale,
    sparkline,
    wrapped,
)
from gateway.status import Event, FrontEndStatus, RankStatus

MAX_EVENTS = 6  # where there is no height to fill
MAX_EVENT_LINES = 3
MIN_EVENTS = 4  # that keep their place, so that the ranks do not move when something happens
SLOW_LOOP_MS = 50.0
FRONT_END_WIDTH = 58
SLOW_ANSWER_S = 1.5
OLD_WORD_S = 2.0  # of a front end: it says something every 250 ms
RECENT_S = 60.0
STATE_ORDER = [*TROUBLE, "starting", "paused", "sleeping"]


def render(board: Board, view: ViewState, now: float) -> Frame:
    """One frame, exactly as high as the view if that has a height."""
    glyphs = ASCII if view.ascii_only else UNICODE
    page = _Page(board, view, now, glyphs)
    if view.height is None:
        return Frame(page.everything())
    lines = page.lines()[: view.height - 1]
    lines += [page.line() for _ in range(view.height - 1 - len(lines))]
    return Frame([*lines, page.footer()])


@dataclass(frozen=True, slots=True)
class _Row:
    """A line among the ranks. `key` is that of the rank that begins with it."""

    draw: Callable[[], Line]
    key: RankKey | None = None
    is_heading: bool = False


class _Page:
    """The parts of one frame."""

    def __init__(self, board: Board, view: ViewState, now: float, glyphs: Glyphs) -> None:
        self.board = board
        self.view = view
        self.now = now
        self.glyphs = glyphs
        self.table = RankTable(board, view.width, glyphs, now)

    def line(self) -> Line:
        return Line(self.view.width, self.glyphs)

    # --- which parts --------------------------------------------------------------------------------------------------

    def everything(self) -> list[Line]:
        lines = self.summary(limit=10**6)
        if self.board.ranks:
            lines += [self.line(), self.table.head(), *(row.draw() for row in self.rank_lines(spare=10**6)), self.line()]
        return lines + [line for event in self.events()[:MAX_EVENTS] for line in self.event(*event)]

    def lines(self) -> list[Line]:
        assert self.view.height is not None
        view, room = self.view, self.view.height - 1
        if view.page == "help":
            return help_lines(self.line, room)
        summary = self.summary(limit=max(1, room // 5))
        selected = self.selected_rank()
        if view.page == "detail" and selected is not None:
            key, rank = selected
            events = self.event_lines(
                room, [event for event in self.events() if event[1].rank == rank.rank and event[0] == key[0]]
            )
            return (
                summary
                + detail_lines(self.board, key, rank, self.now, self.line, self.glyphs)
                + [self.rule("its events"), *events]
            )
        if view.page == "events":
            return summary + self.events_page(room - len(summary))
        return summary + self.board_lines(room - len(summary))

    def board_lines(self, room: int) -> list[Line]:
        """Ranks and events share what the summary has left; the ranks come first."""
        rows = self.rank_lines()
        if not rows:
            return [self.line(), *self.event_lines(room - 1)]
        blank = [self.line()] if room >= 16 else []
        room -= len(blank) + 2  # the table's head, the events' rule
        most = max(1, room - min(MIN_EVENTS, room // 4))
        rows = self.rank_lines(spare=max(most - len(rows), most // 4))
        num_rows = min(len(rows), most)
        selected = next((i for i, row in enumerate(rows) if row.key is not None and row.key == self.view.selected), 0)
        first = max(0, min(selected - num_rows // 2, len(rows) - num_rows))
        if rows[first + num_rows - 1].is_heading and num_rows > 1:
            num_rows -= 1  # of ranks that are not seen
        shown = [row.draw() for row in rows[first : first + num_rows]]
        hidden = [(row.key, first > i) for i, row in enumerate(rows) if row.key and not first <= i < first + num_rows]
        above, below = sum(is_above for _, is_above in hidden), sum(not is_above for _, is_above in hidden)
        return [
            *blank,
            self.table.head(),
            *shown,
            self.rule("events", self._hidden(above, below)),
            *self.event_lines(room - num_rows),
        ]

    def _hidden(self, above: int, below: int) -> str:
        parts = [f"{self.glyphs.up} {above} above"] * (above > 0) + [f"{self.glyphs.down} {below} below"] * (below > 0)
        return "  ".join(parts)

    def rule(self, title: str, note: str = "") -> Line:
        rule = self.glyphs.rule
        line = self.line().add(f"{rule * 2} {title} ", DIM)
        note = f" {note} {rule * 2}" if note else ""
        return line.add(rule * max(0, line.left - len(note)), DIM).add(note, BOLD)

    # --- the top ------------------------------------------------------------------------------------------------------

    def summary(self, limit: int) -> list[Line]:
        """Endpoints, rates, totals, front ends: `limit` lines for what there may be many of."""
        lines = self.endpoint_lines(limit)
        if self.board.statuses:
            lines += [self.rates(), self.totals(), *self.front_end_lines(limit)]
        return lines

    def endpoint_lines(self, limit: int) -> list[Line]:
        """Those that somebody should look at come first where there is no room for all."""
        rows = list(enumerate(self.board.endpoints))
        if len(rows) <= limit:
            return [self.endpoint(index, endpoint) for index, endpoint in rows]
        rows.sort(key=lambda row: (row[1].error is None, row[1].status is not None and row[1].status.state == "ready", row[0]))
        shown, rest = rows[: limit - 1] if limit > 1 else rows[:1], rows[limit - 1 :] if limit > 1 else rows[1:]
        num_bad = sum(e.error is not None or (e.status is not None and e.status.state != "ready") for _, e in rest)
        text = f"and {counted(len(rest), 'more endpoint')}, {f'{num_bad} of them not ready' if num_bad else 'all ready'}"
        return [*(self.endpoint(index, endpoint) for index, endpoint in shown), self.line().add(text, RED if num_bad else DIM)][
            : max(limit, 1)
        ]

    def endpoint(self, index: int, endpoint: Endpoint) -> Line:
        line, status = self.line(), endpoint.status
        if len(self.board.endpoints) > 1:
            line.add(f"{index} ", DIM)
        if endpoint.error is not None:
            line.add(" unreachable ", ALARM).add(" ").add(endpoint.url, BOLD).add(f" {endpoint.error}", RED)
            seen = f"seen {duration(self.now - endpoint.read_s)} ago" if status is not None else "never seen"
            return line.right(f" {seen} " if self.view.is_once else f" {seen}, trying ", YELLOW)
        if status is None:
            return line.add("connecting", DIM).add(f" {endpoint.url}")
        line.add(f" {status.state} ", STATE_STYLES.get(status.state, PLAIN) + Style(reverse=True, bold=True)).add(" ")
        note = self.endpoint_note(endpoint)
        right = note or f"up {duration(status.uptime_s)}"
        line.pieces([(status.model or "?", BOLD), *self.rank_states(status.ranks)], reserve=len(note) + 1 if note else 0)
        pieces = [("", PLAIN)]
        balancer = status.balancer
        if balancer is not None and balancer.policy != "none":
            pieces.append((f"{balancer.policy}, {balancer.dispatch}", DIM))
        nodes = {rank.node for rank in status.ranks if rank.node}
        node = f"node {nodes.pop()}" if len(nodes) == 1 else ""
        pieces += [(text, DIM) for text in (endpoint.url, status.mode, node, f"gateway {status.version or '?'}") if text]
        return line.pieces(pieces, reserve=len(right) + 2).right(right + " ", YELLOW if note else DIM)

    def endpoint_note(self, endpoint: Endpoint) -> str:
        """What is not as usual about the connection."""
        if self.view.paused_s is not None:
            return f"PAUSED, as of {duration(self.now - endpoint.read_s)} ago"
        if endpoint.asked_s is not None and self.now - endpoint.asked_s > SLOW_ANSWER_S:
            return f"no answer for {duration(self.now - endpoint.asked_s)}"
        if endpoint.back_s is not None and self.now - endpoint.back_s < RECENT_S:
            times = f", {endpoint.num_outages} outages" if endpoint.num_outages > 1 else ""
            return f"connection lost, back since {duration(self.now - endpoint.back_s)}{times}"
        return ""

    def rank_states(self, ranks: Sequence[RankStatus]) -> list[tuple[str, Style]]:
        """How many are ready, and which are not."""
        if not ranks:
            return []
        by_state: dict[str, list[int]] = {}
        for rank in ranks:
            by_state.setdefault(rank.state, []).append(rank.rank)
        ready = by_state.pop("ready", [])
        pieces = [(f"{len(ready)}/{len(ranks)} ready", PLAIN)]
        order = sorted(by_state, key=lambda s: STATE_ORDER.index(s) if s in STATE_ORDER else 99)
        for state in order:
            numbers = by_state[state]
            names = ",".join(map(str, numbers[:4])) + (f",+{len(numbers) - 4}" if len(numbers) > 4 else "")
            style = STATE_STYLES.get(state, PLAIN)
            pieces.append((f"{state or '?'}: {names}", BOLD_RED if style is ALARM else style))
        return pieces

    def rates(self) -> Line:
        """What goes on now."""
        board = self.board
        ranks = [rank for _, rank in board.ranks]
        width = 60 if self.view.width >= 190 else 20 if self.view.width >= 110 else 12
        front_ends = [f for status in board.statuses for f in status.front_ends]
        requests_per_s = board.per_s("requests")
        req_s = self.glyphs.none if requests_per_s is None else per_second(requests_per_s)
        line = self.line()
        for title, name in (("out", "generation_tokens_per_s"), ("in", "prompt_tokens_per_s")):
            values = board.history.buckets(name, width, self.now)
            scale = round_scale(max((v for v in values if v is not None), default=0.0), 10)
            line.add(f" {per_second(board.rate(name)):>5}", BOLD).add(f" tok/s {title} ").add(
                sparkline(values, scale, self.glyphs), CYAN
            ).add(" ")
        return line.pieces(
            [
                (f"{req_s:>5} req/s", BOLD),
                (f"{count(sum(f.in_flight for f in front_ends)):>5} in flight", PLAIN),
                (f"{count(sum(rank.waiting for rank in ranks)):>5} waiting", PLAIN),
                (f"{count(sum(rank.running for rank in ranks)):>5} running", PLAIN),
            ]
        )

    def totals(self) -> Line:
        """Since the start. What grew in the last minute and should not have is red."""
        board = self.board
        pieces: list[tuple[str, Style]] = [(counted(count(board.total("requests")), "request"), PLAIN)]
        for name in ("failed", "rejected", "moved", "aborted"):
            lately = board.growth(name)
            style = BOLD_RED if name == "failed" and lately else YELLOW if name != "aborted" and lately else PLAIN
            pieces.append((f"{count(board.total(name))} {name}" + (f" (+{count(lately)})" if lately else ""), style))
        pieces += [
            (f"{counted(count(board.total('prompt_tokens')), 'token')} in", PLAIN),
            (f"{count(board.total('generation_tokens'))} out", PLAIN),
        ]
        return self.line().add(" ").pieces(pieces)

    def front_end_lines(self, limit: int) -> list[Line]:
        """As many in a line as go there: all have the same width."""
        rows = [
            (f"{i}/{f.index}" if len(self.board.endpoints) > 1 else str(f.index), f)
            for i, endpoint in enumerate(self.board.endpoints)
            if endpoint.status is not None
            for f in endpoint.status.front_ends
        ]
        if len(rows) > limit:  # the slow ones
            rows.sort(key=lambda row: (-row[1].event_loop_lag_ms, row[0]))
        per_line = max(1, self.view.width // FRONT_END_WIDTH)
        lines = []
        for start in range(0, min(len(rows), limit * per_line), per_line):
            line = self.line()
            for i, (name, front_end) in enumerate(rows[start : start + per_line]):
                line.add(" " * (i * FRONT_END_WIDTH - (line.width - line.left)))
                self.front_end(line, name, front_end)
            lines.append(line)
        return lines

    def front_end(self, line: Line, name: str, front_end: FrontEndStatus) -> None:
        lag = front_end.event_loop_lag_ms
        line.add(" front end ", DIM).add(name.ljust(3)).add(f"{count(front_end.in_flight):>5} in flight")
        line.add(f"{count(front_end.queued):>5} queued", YELLOW if front_end.queued else PLAIN)
        line.add("  lag ").add(
            f"{min(lag, 99_999):>5.1f}ms" if lag < 1000 else f"{min(lag, 999_999) / 1000:>5.1f}s ",
            RED if lag >= SLOW_LOOP_MS else PLAIN,
        )
        if front_end.age_s > OLD_WORD_S:
            line.add(f" silent {duration(front_end.age_s)}", BOLD_RED)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def rank_lines(self, spare: int = 0) -> list[_Row]:
        """All ranks and the headings of their nodes. Only those that are seen are drawn. A rank that died gets so many lines as
        its cause takes, as long as there are `spare` ones."""
        lines: list[_Row] = []
        for name, rows in by_node(self.board, self.view):
            if name and rows:
                heading = functools.partial(group_line, name, rows, self.view.width, self.glyphs)
                lines.append(_Row(heading, is_heading=True))
            for key, rank in rows:
                of_rank = self.lines_of_rank(key, rank, spare)
                spare -= len(of_rank) - 1
                lines += of_rank
        return lines

    def lines_of_rank(self, key: RankKey, rank: RankStatus, spare: int) -> list[_Row]:
        how = {"is_selected": key == self.view.selected, "is_stale": self.board.endpoints[key[0]].is_stale}
        story = self.table.story(rank, is_whole=True)
        if len(story) - 1 > spare:
            story = self.table.story(rank, is_whole=False)
        row = _Row(functools.partial(self.table.row, key, rank, story[0] if story else None, **how), key)
        return [row, *(_Row(functools.partial(self.table.more_of, rank, line, **how)) for line in story[1:])]

    def selected_rank(self) -> tuple[RankKey, RankStatus] | None:
        return next((row for row in self.board.ranks if row[0] == self.view.selected), None)

    # --- events -------------------------------------------------------------------------------------------------------

    def events(self) -> list[tuple[int, Event, float]]:
        """Of all endpoints, with the endpoint and their age now, newest first."""
        events = [
            (index, event, event.age_s + self.now - endpoint.read_s)
            for index, endpoint in enumerate(self.board.endpoints)
            if endpoint.status is not None
            for event in endpoint.status.events
        ]
        return sorted(events, key=lambda row: (row[2], -row[1].seq))

    def event_lines(self, room: int, events: Sequence[tuple[int, Event, float]] | None = None) -> list[Line]:
        events = self.events() if events is None else events
        return [line for row in events[: max(0, room)] for line in self.event(*row)][: max(0, room)]

    def event(self, index: int, event: Event, age_s: float) -> list[Line]:
        """In as many lines as its text takes, up to a bound."""
        style = RED if event.kind in ("death", "stall") else YELLOW if event.kind in ("move", "drain", "scale") else PLAIN
        if age_s > RECENT_S:
            style = style + DIM
        name = "" if event.rank is None else f"rank {self.table.name((index, event.rank))}"
        line = self.line().add(f"{duration(age_s):>8} ago  ", DIM).add(f"{event.kind:<8}", style).add(f"{name:<10}", style)
        indent = " " * (line.width - line.left)
        first, *more = wrapped(clean(first_line(event.text)), line.left, MAX_EVENT_LINES, self.glyphs)
        return [line.add(first, style), *(self.line().add(indent).add(text, style) for text in more)]

    def events_page(self, room: int) -> list[Line]:
        events = self.events()
        heights = [len(self.event(*event)) for event in events]
        last_page = len(events) - _num_that_fit(reversed(heights), room - 1)
        first = min(self.view.scroll, last_page)
        num_shown = _num_that_fit(heights[first:], room - 1)
        note = self._hidden(first, len(events) - first - num_shown)
        return [self.rule("events", note), *self.event_lines(room - 1, events[first : first + num_shown])]

    # --- the bottom ---------------------------------------------------------------------------------------------------

    def footer(self) -> Line:
        view = self.view
        order = view.sort + (" reversed" if view.reverse else "")
        keys = {
            "board": [
                ("q", "quit"),
                ("?", "help"),
                ("s", f"sort: {order}"),
                ("p", "pause"),
                ("j/k", "select"),
                ("enter", "detail"),
                ("e", "events"),
            ],
            "detail": [("q", "quit"), ("esc", "back"), ("j/k", "other rank"), ("p", "pause"), ("e", "events")],
            "events": [("q", "quit"), ("esc", "back"), ("j/k", "scroll"), ("p", "pause")],
            "help": [("q", "quit"), ("esc", "back")],
        }[view.page]
        if view.paused_s is not None:
            keys = [(key, "go on" if text == "pause" else text) for key, text in keys]
        line = self.line()
        for key, text in keys:
            if len(key) + len(text) + 4 > line.left:
                break
            line.add(f" {key}", BOLD).add(f" {text} ", DIM)
        return line.right(f"every {view.interval_s:g}s ", DIM)


def _num_that_fit(heights: Iterable[int], room: int) -> int:
    return sum(total <= room for total in itertools.accumulate(heights))


__all__ = ["WINDOW_S", "render"]

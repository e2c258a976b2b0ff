"""A line for each rank. Which columns there are depends on the width alone, so that none ever moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style

from gateway.dashboard.board import Board, RankKey
from gateway.dashboard.lines import (
    BOLD,
    BOLD_RED,
    CYAN,
    DIM,
    GREEN,
    GREEN_BAR,
    PLAIN,
    RED,
    RED_BAR,
    SELECTED,
    STATE_STYLES,
    YELLOW,
    YELLOW_BAR,
    Line,
)
from gateway.dashboard.state import TROUBLE_GROUP
from gateway.dashboard.words import (
    Glyphs,
    bar,
    clean,
    clip,
    count,
    duration,
    first_line,
    per_second,
    percent,
    round_scale,
    short_time,
    sparkline,
    step_time,
    wrapped,
)
from gateway.status import RankStatus

MAX_STORY_LINES = 4
OLD_SIGNAL_MS = 2000.0  # a rank says something every 500 ms, whatever it does
STATE_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Scales:
    """What a full bar or the top of a sparkline stands for: the same for all ranks, so that they can be compared."""

    waiting: float
    running: float  # where a rank does not say how many it takes
    tokens_per_s: float


def scales_of(board: Board) -> Scales:
    ranks = [rank for _, rank in board.ranks]
    rates = [board.history.largest(("generation_tokens_per_s", *key)) for key, _ in board.ranks]
    return Scales(
        waiting=round_scale(max((rank.waiting for rank in ranks), default=0), 10),
        running=round_scale(max((rank.running for rank in ranks), default=0), 10),
        tokens_per_s=round_scale(max(rates, default=0.0), 10),
    )


@dataclass(frozen=True, slots=True)
class _Context:
    board: Board
    scales: Scales
    now: float
    glyphs: Glyphs
    gap: int  # before each column


_Draw = Callable[[Line, RankKey, RankStatus, _Context, int], None]  # fills the gap and as many cells


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int  # 0: what is left
    draw: _Draw
    is_left: bool = False  # aligned


def _plain(rank: RankStatus) -> Style:
    return PLAIN


def _number(text: Callable[[RankStatus, Glyphs], str], style: Callable[[RankStatus], Style] = _plain) -> _Draw:
    def draw(line: Line, key: RankKey, rank: RankStatus, context: _Context, width: int) -> None:
        width += context.gap
        line.add_cells(text(rank, context.glyphs).rjust(width), width, style(rank))

    return draw


NUM_DIGITS = 4  # of a number that has a bar


def _with_bar(
    text: Callable[[RankStatus], str], share: Callable[[RankStatus, Scales], float], style: Callable[[float], Style]
) -> _Draw:
    def draw(line: Line, key: RankKey, rank: RankStatus, context: _Context, width: int) -> None:
        number = text(rank).rjust(context.gap + NUM_DIGITS) + " "
        line.add_cells(number, len(number))
        part, room = share(rank, context.scales), width - NUM_DIGITS - 1
        line.add_cells(bar(part, room, context.glyphs).ljust(room), room, style(part))

    return draw


def _usage_style(share: float) -> Style:
    return RED_BAR if share >= 0.95 else YELLOW_BAR if share >= 0.8 else GREEN_BAR


def _running_share(rank: RankStatus, scales: Scales) -> float:
    return rank.running / (rank.max_num_seqs or scales.running)


def _draw_spark(line: Line, key: RankKey, rank: RankStatus, context: _Context, width: int) -> None:
    values = context.board.history.buckets(("generation_tokens_per_s", *key), width, context.now)
    picture = sparkline(values, context.scales.tokens_per_s, context.glyphs)
    line.add_cells(" " * context.gap + picture, context.gap + width, CYAN)


def _draw_death(line: Line, key: RankKey, rank: RankStatus, context: _Context, width: int) -> None:
    line.add(" " * context.gap)
    line.cell(last_death(rank, context.glyphs), line.left, DIM if rank.last_death_s_ago is None else YELLOW)


def last_death(rank: RankStatus, glyphs: Glyphs) -> str:
    if rank.last_death_s_ago is None:
        return glyphs.none
    return f"{duration(rank.last_death_s_ago)} ago: {first_line(rank.death_cause or '?')}"


def _signal_style(rank: RankStatus) -> Style:
    return RED if rank.signal_age_ms is not None and rank.signal_age_ms > OLD_SIGNAL_MS else PLAIN


def _waiting(width: int) -> _Column:
    draw = _with_bar(lambda r: count(r.waiting), lambda r, s: r.waiting / s.waiting, lambda share: YELLOW_BAR)
    return _Column("waiting", width, draw, is_left=True)


def _running(width: int) -> _Column:
    return _Column(
        "running", width, _with_bar(lambda r: count(r.running), _running_share, lambda share: GREEN_BAR), is_left=True
    )


def _kv(width: int) -> _Column:
    draw = _with_bar(lambda r: percent(r.kv_cache_usage), lambda r, s: r.kv_cache_usage, _usage_style)
    return _Column("kv cache", width, draw, is_left=True)


_RATE = _Column("tok/s", 5, _number(lambda r, g: per_second(r.generation_tokens_per_s), lambda r: BOLD))
_STEP = _Column("step", 6, _number(lambda r, g: step_time(r.step_ms, g)))
_SIGNAL = _Column("signal", 6, _number(lambda r, g: short_time(r.signal_age_ms, g), _signal_style))
_HITS = _Column("hits", 4, _number(lambda r, g: percent(r.prefix_cache_hit_rate)))
_RESTARTS = _Column(
    "rst", 3, _number(lambda r, g: count(r.restarts) if r.restarts else g.none, lambda r: YELLOW if r.restarts else DIM)
)
_IN_RATE = _Column("in tok/s", 8, _number(lambda r, g: per_second(r.prompt_tokens_per_s)))
_QUEUED = _Column("queued", 6, _number(lambda r, g: count(r.queued_tokens)))
_BOOKED = _Column("booked", 6, _number(lambda r, g: count(r.ledger_tokens)))
_REQUESTS = _Column("requests", 8, _number(lambda r, g: count(r.requests_total)))
_MOVED = _Column(
    "moved", 5, _number(lambda r, g: count(r.requests_moved_away), lambda r: YELLOW if r.requests_moved_away else PLAIN)
)


def _spark(width: int) -> _Column:
    return _Column("minute" if width < 11 else "last minute", width, _draw_spark, is_left=True)


def columns_of(width: int) -> tuple[int, list[_Column]]:
    """The gap before each column, and the columns. The last one gets what is left."""
    if width < 100:
        return 1, [_waiting(8), _running(8), _kv(10), _RATE, _spark(6), _STEP, _SIGNAL, _HITS, _RESTARTS]
    death = _Column("last death", 0, _draw_death, is_left=True)
    if width < 170:
        return 2, [_waiting(9), _running(9), _kv(10), _RATE, _spark(12), _STEP, _SIGNAL, _HITS, _RESTARTS, death]
    return 2, [
        _waiting(13), _running(13), _kv(15), _IN_RATE, _RATE, _spark(20), _STEP, _SIGNAL, _HITS, _QUEUED, _BOOKED, _REQUESTS,
        _MOVED, _RESTARTS, death,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoryLine:
    text: str
    end: str = ""  # at the right


class RankTable:
    """Draws the head and the rows of one frame."""

    def __init__(self, board: Board, width: int, glyphs: Glyphs, now: float) -> None:
        self._board = board
        self._width = width
        self._glyphs = glyphs
        self._gap, self._columns = columns_of(width)
        self._context = _Context(board, scales_of(board), now, glyphs, self._gap)
        self._has_clash = board.has_name_clash()
        self._name_width = 5 if self._has_clash else 3
        self._stall_texts = _stall_texts(board)

    def name(self, key: RankKey) -> str:
        return f"{key[0]}/{key[1]}" if self._has_clash else str(key[1])

    def head(self) -> Line:
        line = Line(self._width, self._glyphs)
        line.add("rank".ljust(self._name_width + 2), DIM).add("state".ljust(STATE_WIDTH), DIM)
        for column in self._columns:
            line.add(" " * self._gap)
            title = column.title[: column.width] if column.width else column.title
            line.add(title.ljust(column.width) if column.is_left else title.rjust(column.width), DIM)
        return line

    def story(self, rank: RankStatus, *, is_whole: bool) -> list[StoryLine]:
        """When and why a rank died, and whether it comes back, instead of numbers that are all zero or old: in as many lines as
        that takes, or in one. Nothing of other ranks."""
        is_dead = rank.state == "dead"
        if not is_dead and (rank.state != "restarting" or rank.start_progress):
            return []
        text = "" if rank.last_death_s_ago is None else clean(last_death(rank, self._glyphs))
        if not is_dead:  # by an order, or as it died
            text = f"loading; died {text}" if text else "loading"
        end = ("comes back" if rank.restart_pending else "stays dead") if is_dead else ""
        width = self._width - self._name_width - 2 - STATE_WIDTH - self._gap
        *lines, last = wrapped(text, width, MAX_STORY_LINES if is_whole else 1, self._glyphs)
        # The end stands beside a word of the cause, never alone.
        lines += wrapped(last, width - len(end) - 1, MAX_STORY_LINES - len(lines) if is_whole else 1, self._glyphs)
        return [*map(StoryLine, lines[:-1]), StoryLine(lines[-1], end)]

    def row(self, key: RankKey, rank: RankStatus, story: StoryLine | None = None, *, is_selected: bool, is_stale: bool) -> Line:
        """Its first line; `more_of` draws those that a story has behind it."""
        line = Line(self._width, self._glyphs)
        style = STATE_STYLES.get(rank.state, PLAIN)
        line.add(self._glyphs.selected if is_selected else " ", BOLD)
        line.add(self.name(key).rjust(self._name_width) + " ", BOLD_RED if rank.state in ("dead", "stalled") else PLAIN)
        state = clip(rank.state or "?", STATE_WIDTH, self._glyphs)
        line.add(state, style).add(" " * max(0, STATE_WIDTH - cell_len(state)))
        if story is not None:
            self._tell_death(line, rank, story)
        elif rank.state == "stalled":
            line.add(" " * self._gap).add(self._stall_texts.get(key, "it has work and makes no step"), RED)
        elif rank.state in ("starting", "restarting"):
            self._tell_start(line.add(" " * self._gap), rank)
        else:
            for column in self._columns:
                column.draw(line, key, rank, self._context, column.width)
        return self._finished(line, is_selected=is_selected, is_stale=is_stale)

    def more_of(self, rank: RankStatus, story: StoryLine, *, is_selected: bool, is_stale: bool) -> Line:
        line = Line(self._width, self._glyphs).add(" " * (self._name_width + 2 + STATE_WIDTH))
        self._tell_death(line, rank, story)
        return self._finished(line, is_selected=is_selected, is_stale=is_stale)

    @staticmethod
    def _finished(line: Line, *, is_selected: bool, is_stale: bool) -> Line:
        if is_selected:
            line.styled(SELECTED)
        return line.styled(DIM) if is_stale else line

    def _tell_death(self, line: Line, rank: RankStatus, story: StoryLine) -> None:
        line.add(" " * self._gap).add(story.text, RED if rank.state == "dead" else YELLOW)
        if story.end:
            line.right(story.end, DIM)

    def _tell_start(self, line: Line, rank: RankStatus) -> None:
        if rank.start_progress:
            line.add(f"{rank.start_progress:>4.0%} ").add(bar(rank.start_progress, 20, self._glyphs).ljust(20), YELLOW_BAR)
            line.add(" of its weights")
        else:
            line.add("loading")
        if rank.pid is not None:
            line.add(f", pid {rank.pid}", DIM)


def _stall_texts(board: Board) -> dict[RankKey, str]:
    """By rank: the news of its last stall, without what its row says already."""
    texts: dict[RankKey, str] = {}
    for index, endpoint in enumerate(board.endpoints):
        for event in endpoint.status.events if endpoint.status is not None else ():
            if event.kind == "stall" and event.rank is not None:
                texts[index, event.rank] = first_line(event.text.partition("stalled: ")[2] or event.text)
    return texts


def group_line(name: str, rows: Sequence[tuple[RankKey, RankStatus]], width: int, glyphs: Glyphs) -> Line:
    """Above the ranks of a node, with what they do together; above those in trouble, whose rows say all."""
    line = Line(width, glyphs).add(f"{glyphs.rule * 2} ", DIM).add(first_line(name), BOLD).add("  ")
    if name != TROUBLE_GROUP:
        ranks = [rank for _, rank in rows]
        num_ready = sum(rank.state == "ready" for rank in ranks)
        usage = sum(rank.kv_cache_usage for rank in ranks) / len(ranks)
        rate = sum(rank.generation_tokens_per_s for rank in ranks)
        line.add(f"{num_ready}/{len(ranks)} ready", GREEN if num_ready == len(ranks) else YELLOW)
        line.add(f"{count(sum(rank.waiting for rank in ranks)):>7} waiting")
        line.add(f"{count(sum(rank.running for rank in ranks)):>7} running")
        line.add(f"  kv {percent(usage):>4}{per_second(rate):>7} tok/s ")
    return line.add(glyphs.rule * line.left, DIM)

"""Draws status documents. A pure function of them and the width; the console only shows what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.dashboard.feed import Reading
from gateway.status import Event, FrontEndStatus, RankStatus, StatusSnapshot

STATE_STYLES = {
    "ready": "green", "starting": "yellow", "restarting": "yellow", "suspect": "yellow", "degraded": "yellow",
    "draining": "cyan", "paused": "blue", "sleeping": "blue", "stalled": "bold red", "dead": "bold red",
    "unreachable": "bold red",
}  # fmt: skip
MAX_EVENTS = 6
BAR_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Glyphs:
    full: str
    empty: str
    dot: str
    none: str
    box: box.Box


UNICODE = Glyphs("█", "░", "·", "–", box.SIMPLE_HEAD)
# Like SIMPLE_HEAD, whose rule is not ASCII.
ASCII = Glyphs("#", ".", "|", "-", box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True))


def render(readings: Sequence[Reading], width: int, *, ascii_only: bool = False) -> RenderableType:
    """One frame: headings, a table of all ranks, front ends, totals, events."""
    glyphs = ASCII if ascii_only else UNICODE
    several = len(readings) > 1
    statuses = [reading.status for reading in readings if reading.status is not None]
    parts: list[RenderableType] = [_heading(reading, glyphs, _endpoint(i, several)) for i, reading in enumerate(readings)]
    rows = [(i, rank) for i, reading in enumerate(readings) if reading.status for rank in reading.status.ranks]
    if rows:
        parts += ["", _rank_table(rows, width, glyphs, several), ""]
    for i, reading in enumerate(readings):
        if reading.status is not None:
            parts += [_front_end_line(_endpoint(i, several), f, glyphs) for f in reading.status.front_ends]
    if statuses:
        parts += [_totals_line(statuses, glyphs), *_balancer_lines(statuses, glyphs)]
    parts += _event_lines(readings, several)
    return Group(*parts)


def _endpoint(index: int, several: bool) -> str:
    """How ranks and front ends of one of several endpoints are told apart."""
    return f"{index}/" if several else ""


# --- lines ------------------------------------------------------------------------------------------------------------


def _line(pieces: Iterable[str | Text], glyphs: Glyphs, endpoint: str = "", *, no_wrap: bool = True) -> Text:
    """One line of the console, cut off where it ends."""
    start = Text(f"{endpoint} " if endpoint else "", no_wrap=no_wrap, overflow="ellipsis")
    return start + Text(f" {glyphs.dot} ").join([piece if isinstance(piece, Text) else Text(piece) for piece in pieces])


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def _heading(reading: Reading, glyphs: Glyphs, endpoint: str) -> Text:
    status = reading.status
    if status is None:  # what went wrong is never cut off
        return _line([_state("unreachable"), reading.url, reading.error or ""], glyphs, endpoint, no_wrap=False)
    pieces = [f"gateway {status.version}", status.model, status.mode, f"up {duration(status.uptime_s)}", reading.url]
    return _line([_state(status.state), *[piece for piece in pieces if piece]], glyphs, endpoint)


def _front_end_line(endpoint: str, front_end: FrontEndStatus, glyphs: Glyphs) -> Text:
    lag_ms = front_end.event_loop_lag_ms
    return _line(
        [
            f"front end {endpoint}{front_end.index}",
            f"pid {front_end.pid}",
            f"{front_end.in_flight} in flight",
            f"{front_end.queued} queued",
            Text(f"loop lag {lag_ms:.1f} ms", style="red" if lag_ms >= 50 else ""),
        ],
        glyphs,
    )


def _totals_line(statuses: Sequence[StatusSnapshot], glyphs: Glyphs) -> Text:
    def total(name: str) -> int:
        return sum(getattr(status.totals, name) for status in statuses)

    per_s = sum(rank.generation_tokens_per_s for status in statuses for rank in status.ranks)
    pieces: list[str | Text] = [f"{count(total('requests'))} requests"]
    for name in ("aborted", "failed", "rejected", "moved"):
        style = "red" if name == "failed" and total(name) else ""
        pieces.append(Text(f"{count(total(name))} {name}", style=style))
    pieces += [f"{count(total('prompt_tokens'))} tokens in", f"{count(total('generation_tokens'))} out", f"{per_s:.0f} tok/s"]
    return _line(pieces, glyphs)


def _balancer_lines(statuses: Sequence[StatusSnapshot], glyphs: Glyphs) -> list[Text]:
    balancers = {(b.policy, b.dispatch): b for status in statuses if (b := status.balancer) is not None}
    return [
        _line([f"policy {b.policy}", f"dispatch {b.dispatch}", f"oldest signal {_age_ms(b.signal_age_ms, glyphs)}"], glyphs)
        for b in balancers.values()
    ]


def _event_lines(readings: Sequence[Reading], several: bool) -> list[Text]:
    """The newest events of all endpoints, newest first."""
    events = [
        (event.age_s, _endpoint(i, several), event)
        for i, reading in enumerate(readings)
        if reading.status is not None
        for event in reading.status.events
    ]
    newest = sorted(events, key=lambda row: row[0])[:MAX_EVENTS]
    return [_event_line(endpoint, event) for _, endpoint, event in newest]


def _event_line(endpoint: str, event: Event) -> Text:
    rank = "" if event.rank is None else f"rank {endpoint}{event.rank} "
    style = "red" if event.kind in ("death", "stall") else "dim"
    return Text(
        f"{duration(event.age_s):>7} ago  {event.kind:<8} {rank}{_first_line(event.text)}",
        style=style,
        no_wrap=True,
        overflow="ellipsis",
    )


# --- the table of ranks -----------------------------------------------------------------------------------------------


def _bar(share: float, glyphs: Glyphs) -> Text:
    filled = round(BAR_WIDTH * min(1.0, max(0.0, share)))
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    bar = Text(glyphs.full * filled, style=style) + Text(glyphs.empty * (BAR_WIDTH - filled), style="dim")
    return bar + Text(f"{100 * share:>4.0f}%")


def _last_death(rank: RankStatus, glyphs: Glyphs) -> str:
    if rank.last_death_s_ago is None:
        return glyphs.none
    return f"{duration(rank.last_death_s_ago)} ago: {_first_line(rank.death_cause or '?')}"


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    cell: Callable[[RankStatus, Glyphs], str | Text]
    is_number: bool = True


# In order of what is given up last when the console is narrow. They are shown in `_ORDER`.
_COLUMNS = (
    _Column("state", 10, lambda r, g: _state(r.state), is_number=False),
    _Column("wait", 5, lambda r, g: count(r.waiting)),
    _Column("run", 5, lambda r, g: count(r.running)),
    _Column("kv cache", BAR_WIDTH + 5, lambda r, g: _bar(r.kv_cache_usage, g), is_number=False),
    _Column("tok/s", 7, lambda r, g: f"{r.generation_tokens_per_s:.0f}"),
    _Column("step", 7, lambda r, g: f"{r.step_ms:.1f}ms" if r.step_ms else g.none),
    _Column("signal", 7, lambda r, g: _age_ms(r.signal_age_ms, g)),
    _Column("restarts", 8, lambda r, g: str(r.restarts)),
    _Column("last death", 24, _last_death, is_number=False),
    _Column("in tok/s", 8, lambda r, g: f"{r.prompt_tokens_per_s:.0f}"),
    _Column("queued tok", 10, lambda r, g: count(r.queued_tokens)),
    _Column("booked tok", 10, lambda r, g: count(r.ledger_tokens)),
    _Column("hits", 5, lambda r, g: f"{100 * r.prefix_cache_hit_rate:.0f}%"),
    _Column("requests", 8, lambda r, g: count(r.requests_total)),
    _Column("device", 12, lambda r, g: r.device or g.none, is_number=False),
    _Column("pid", 8, lambda r, g: g.none if r.pid is None else str(r.pid)),
)
_ORDER = (
    "state", "wait", "run", "queued tok", "booked tok", "kv cache", "hits", "in tok/s", "tok/s", "step", "signal", "requests",
    "restarts", "last death", "device", "pid",
)  # fmt: skip
RANK_WIDTH = 4
GAP = 2


def _rank_table(rows: Sequence[tuple[int, RankStatus]], width: int, glyphs: Glyphs, several: bool) -> Table:
    columns = _columns_that_fit(width)
    # One blank of padding and one that separates: together the gap.
    table = Table(box=glyphs.box, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("rank", no_wrap=True, width=RANK_WIDTH)
    for column in columns:
        justify = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis", width=column.width)  # type: ignore[arg-type]  # rich's Literal
    for endpoint, rank in rows:
        name = f"{_endpoint(endpoint, several)}{rank.rank}"
        table.add_row(name, *[column.cell(rank, glyphs) for column in columns])
    return table


def _columns_that_fit(width: int) -> list[_Column]:
    left = width - RANK_WIDTH - GAP
    chosen = []
    for column in _COLUMNS:
        left -= column.width + GAP
        if left < 0:
            break
        chosen.append(column)
    return sorted(chosen, key=lambda column: _ORDER.index(column.title))


# --- words ------------------------------------------------------------------------------------------------------------


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _age_ms(age_ms: float | None, glyphs: Glyphs) -> str:
    if age_ms is None:
        return glyphs.none
    return f"{age_ms:.0f}ms" if age_ms < 1000 else duration(age_ms / 1000)


def duration(seconds: float) -> str:
    """The two largest units: 4s, 3m 20s, 2h 5m, 3d 4h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    for unit, size, part, part_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part_size}{part}"
    raise AssertionError(whole)


def count(number: int) -> str:
    """At most five characters: 999, 12.3k, 4.5M."""
    if number < 10_000:
        return str(number)
    for suffix, size in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        value = number / size
        if value < 999.5:
            return f"{value:.1f}{suffix}" if value < 99.95 else f"{value:.0f}{suffix}"
    return f"{number:.0e}"

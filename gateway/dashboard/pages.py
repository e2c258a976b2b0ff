"""The pages beside the board: all that is known of one rank, and the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rich.style import Style

from gateway.dashboard.board import WINDOW_S, Board, RankKey
from gateway.dashboard.lines import BOLD, CYAN, DIM, PLAIN, RED, STATE_STYLES, Line
from gateway.dashboard.words import (
    Glyphs,
    clean,
    count,
    duration,
    per_second,
    percent,
    round_scale,
    short_time,
    sparkline,
    step_time,
    wrapped,
)
from gateway.status import RankStatus

LABEL_WIDTH = 14

HELP = (
    ("q  ctrl-c", "leave, with the exit code of `--once`"),
    ("?  h", "this page, and back"),
    ("s  S", "order: trouble, rank, waiting, running, kv cache, tok/s,"),
    ("", "step, restarts; S: the one before"),
    ("r", "the order reversed"),
    ("j k  up down", "select a rank; also page up and down, home, end, g, G"),
    ("enter  d  right", "all that is known of the selected rank"),
    ("e", "all events; j and k scroll"),
    ("p  space", "pause: nothing is asked, the last picture stays"),
    ("esc  left", "back; on the board: no rank is selected"),
    ("", ""),
    ("waiting", "requests; a full bar: 10, 20, 50 ... on any rank"),
    ("running", "requests; a full bar: the rank's --max-num-seqs"),
    ("kv cache", "blocks in use; yellow from 80 %, red from 95 %"),
    ("tok/s", "generated; the last minute: all ranks on one scale"),
    ("step, signal", "time of the last step; age of the last load report"),
    ("hits, rst", "prompt tokens found in the prefix cache; restarts"),
    ("lag", "of the event loop, the worst of the last seconds"),
    ("(+n)", "of these, in the last minute"),
)
HELP_NOTE = "It only looks. Operations: gateway ranks drain | undrain | restart | scale"


def help_lines(new_line: Callable[[], Line], room: int) -> list[Line]:
    lines = [new_line().add(" gateway status ", BOLD), new_line()]
    lines += [new_line().add(f"  {key}".ljust(21), BOLD).add(words) for key, words in HELP]
    return [*lines[: room - 1], new_line().add(f"  {HELP_NOTE}", DIM)]


def detail_lines(
    board: Board, key: RankKey, rank: RankStatus, now: float, new_line: Callable[[], Line], glyphs: Glyphs
) -> list[Line]:
    """One rank: who it is, its last minute, its numbers, its deaths, and what a newer server says besides."""
    who = new_line().add(f" rank {rank.rank} ", BOLD).add(rank.state, STATE_STYLES.get(rank.state, PLAIN)).add("  ")
    who.pieces([(text, PLAIN) for text in _who(rank)])
    lines = [new_line(), who, new_line()]
    lines += [_series_line(board, key, row, now, new_line(), glyphs) for row in _series(rank)]
    lines.append(new_line())
    facts = _facts(rank, glyphs) + _unknown_facts(board, key)
    lines += _fact_lines(facts, new_line)
    if rank.death_cause is not None:
        ago = duration(rank.last_death_s_ago or 0.0)
        lines += _paragraph(f"died {ago} ago: {rank.death_cause}", RED, new_line, glyphs)
    return [*lines, new_line()]


def _who(rank: RankStatus) -> list[str]:
    pid = "" if rank.pid is None else f"pid {rank.pid}"
    node = f"node {rank.node}" if rank.node else ""
    progress = "" if rank.start_progress is None else f"{rank.start_progress:.0%} of its weights loaded"
    return [text for text in (f"epoch {rank.epoch}", node, pid, rank.device, progress) if text]


_Row = tuple[str, str, str, float]  # title, number, name of the series, its full scale or 0


def _series(rank: RankStatus) -> list[_Row]:
    return [
        ("tok/s out", per_second(rank.generation_tokens_per_s), "generation_tokens_per_s", 0.0),
        ("tok/s in", per_second(rank.prompt_tokens_per_s), "prompt_tokens_per_s", 0.0),
        ("waiting", count(rank.waiting), "waiting", 0.0),
        ("running", count(rank.running), "running", float(rank.max_num_seqs)),
        ("kv cache", percent(rank.kv_cache_usage), "kv_cache_usage", 1.0),
    ]


def _series_line(board: Board, key: RankKey, row: _Row, now: float, line: Line, glyphs: Glyphs) -> Line:
    title, number, name, full = row
    width = WINDOW_S if line.width >= WINDOW_S + 32 else WINDOW_S // 2 if line.width >= 62 else 6
    values = board.history.buckets((name, *key), width, now)
    scale = full or round_scale(board.history.largest((name, *key)), 10)
    line.add(f" {title}".ljust(LABEL_WIDTH), DIM).add(f"{number:>6} ", BOLD).add(sparkline(values, scale, glyphs), CYAN)
    return line.add(f" of {'100%' if name == 'kv_cache_usage' else count(scale)}", DIM)


def _facts(rank: RankStatus, glyphs: Glyphs) -> list[tuple[str, str]]:
    seen = None if rank.last_seen_s is None else 1000 * rank.last_seen_s
    return [
        ("step", step_time(rank.step_ms, glyphs)),
        ("signal age", short_time(rank.signal_age_ms, glyphs)),
        ("last seen", short_time(seen, glyphs)),
        ("queued tok", count(rank.queued_tokens)),
        ("booked tok", count(rank.ledger_tokens)),
        ("hit rate", percent(rank.prefix_cache_hit_rate)),
        ("prefill tok/s", per_second(rank.prefill_speed_tokens_per_s)),
        ("decode tok/s", per_second(rank.decode_speed_tokens_per_s)),
        ("preemptions", count(rank.preemptions)),
        ("requests", count(rank.requests_total)),
        ("moved in", count(rank.requests_moved_in)),
        ("moved away", count(rank.requests_moved_away)),
        ("prompt tok", count(rank.prompt_tokens)),
        ("generated tok", count(rank.generation_tokens)),
        ("kv blocks", count(rank.num_kv_blocks)),
        ("restarts", count(rank.restarts)),
        ("deaths", count(rank.deaths)),
        ("weights", f"v{rank.weight_version}"),
    ]


def _unknown_facts(board: Board, key: RankKey) -> list[tuple[str, str]]:
    """What a newer server says of it and this version has no name for."""
    reading = board.endpoints[key[0]].reading
    document = (reading.document if reading is not None else None) or {}
    known = {field.name for field in dataclasses.fields(RankStatus)}
    row = next((r for r in document.get("ranks", []) if isinstance(r, dict) and r.get("rank") == key[1]), {})
    return [(name, str(value)) for name, value in row.items() if name not in known and not isinstance(value, dict | list)]


def _fact_lines(facts: list[tuple[str, str]], new_line: Callable[[], Line]) -> list[Line]:
    """Down the columns, as many as go side by side."""
    width = LABEL_WIDTH + 11
    num_columns = max(1, min(6, new_line().width // width))
    num_rows = -(-len(facts) // num_columns)
    lines = []
    for row in range(num_rows):
        line = new_line()
        for title, number in facts[row::num_rows]:
            line.add(f" {title}".ljust(LABEL_WIDTH + 1), DIM).add(f"{number:>6}".ljust(10))
        lines.append(line)
    return lines


def _paragraph(text: str, style: Style, new_line: Callable[[], Line], glyphs: Glyphs) -> list[Line]:
    return [new_line().add(f" {line}", style) for line in wrapped(clean(text), new_line().width - 2, 4, glyphs)]

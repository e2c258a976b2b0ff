"""Numbers, ages and pictures of fixed width, so that nothing on the board moves when a number changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size


@dataclass(frozen=True, slots=True)
class Glyphs:
    bar: str  # from one eighth to full
    spark: str  # from nothing to full
    dot: str
    none: str
    rule: str
    selected: str
    up: str
    down: str
    more: str


UNICODE = Glyphs("▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█", "·", "–", "─", "▶", "▲", "▼", "…")
ASCII = Glyphs("#", ".:-=+*%#", "|", "-", "-", ">", "^", "v", "~")


def clean(text: str) -> str:
    """Of the same length, and nothing in it that a terminal would obey."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def clip(text: str, width: int, glyphs: Glyphs) -> str:
    """At most `width` cells; what is cut off shows."""
    if width <= 0:
        return ""
    if (len(text) if text.isascii() else cell_len(text)) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + glyphs.more


def wrapped(text: str, width: int, max_lines: int, glyphs: Glyphs) -> list[str]:
    """In lines of at most `width` cells, broken at blanks where that leaves no line half empty; what is too much is cut off."""
    lines: list[str] = []
    while len(lines) < max_lines - 1 and cell_len(text) > width > 0:
        head = chop_cells(text, width)[0]
        blank = (head + text[len(head)]).rfind(" ")
        end = blank if 2 * blank > len(head) else len(head)
        lines.append(text[:end])
        text = text[end:].lstrip()
    return [*lines, clip(text, width, glyphs)]


def duration(seconds: float) -> str:
    """The two largest units: 4s, 3m 20s, 2h 5m, 3d 4h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    for unit, size, part, part_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part_size}{part}"
    raise AssertionError(whole)


def short_time(ms: float | None, glyphs: Glyphs) -> str:
    """At most five characters: 4ms, 18.2ms is 18ms, 1.2s, 59s, 3m, 2h, 9d."""
    if ms is None:
        return glyphs.none
    if ms < 999.5:
        return f"{ms:.0f}ms"
    seconds = ms / 1000
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds:.0f}s"


def step_time(ms: float, glyphs: Glyphs) -> str:
    """At most six characters; tenths where they matter. 0: there was no step."""
    if not ms:
        return glyphs.none
    return f"{ms:.1f}ms" if ms < 99.95 else short_time(ms, glyphs)


def count(number: float) -> str:
    """At most five characters: 999, 12.3k, 4.5M."""
    if number < 9_999.5:
        return f"{number:.0f}"
    for suffix, size in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        value = number / size
        if value < 999.5:
            return f"{value:.1f}{suffix}" if value < 99.95 else f"{value:.0f}{suffix}"
    return f"{number:.0e}"


def per_second(rate: float) -> str:
    """At most five characters; tenths of small ones."""
    return f"{rate:.1f}" if 0 < rate < 9.95 else count(rate)


def percent(share: float) -> str:
    """At most four characters."""
    return f"{min(9.99, max(0.0, share)):.0%}"


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """Without its empty part. What is there shows, however little."""
    steps = len(glyphs.bar)
    filled = round(steps * width * min(1.0, max(0.0, share)))
    whole, part = divmod(max(1, filled) if share > 0 else filled, steps)
    return glyphs.bar[-1] * whole + (glyphs.bar[part - 1] if part else "")


def sparkline(values: Sequence[float | None], scale: float, glyphs: Glyphs) -> str:
    """A cell for each value, 0 to `scale`; nothing where nothing is known."""
    top = len(glyphs.spark) - 1
    per_unit = top / scale if scale > 0 else 0.0
    return "".join([" " if v is None else glyphs.spark[min(top, max(0, round(v * per_unit)))] for v in values])


def round_scale(largest: float, smallest_scale: float) -> float:
    """1, 2 or 5 times a power of ten, so that a scale changes seldom."""
    scale = smallest_scale
    while scale < largest:
        mantissa = int(f"{scale:e}"[0])
        scale *= 2.5 if mantissa == 2 else 2
    return scale

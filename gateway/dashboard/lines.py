"""Lines of exact width, and a frame of them. Not a rich Table, which measures every cell anew in each frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from gateway.dashboard.words import Glyphs, clean, clip

PLAIN = Style()
BOLD = Style(bold=True)
DIM = Style(dim=True)
RED = Style(color="red")
BOLD_RED = Style(color="red", bold=True)
YELLOW = Style(color="yellow")
GREEN = Style(color="green")
CYAN = Style(color="cyan")
BLUE = Style(color="blue")
ALARM = Style(color="red", bold=True, reverse=True)  # reversed: it stands out without colours, too
GREEN_BAR, YELLOW_BAR, RED_BAR = (Style(color=color, bgcolor="grey23") for color in ("green", "yellow", "red"))
SELECTED = Style(bold=True, bgcolor="grey30")

STATE_STYLES = {
    "ready": GREEN, "starting": YELLOW, "restarting": YELLOW, "suspect": YELLOW, "degraded": Style(color="yellow", bold=True),
    "draining": CYAN, "paused": BLUE, "sleeping": BLUE, "stalled": ALARM, "dead": ALARM, "unreachable": ALARM,
}  # fmt: skip


class Line:
    """Grows to the right, and takes nothing beyond its width."""

    __slots__ = ("_glyphs", "left", "segments", "width")

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self.width = width
        self.left = width  # cells that are free
        self.segments: list[Segment] = []
        self._glyphs = glyphs

    def add(self, text: str, style: Style = PLAIN) -> Line:
        """Any text, of a server's too."""
        text = clean(text)
        return self.add_cells(text, len(text) if text.isascii() else cell_len(text), style)

    def add_cells(self, text: str, cells: int, style: Style = PLAIN) -> Line:
        """The same for a text of ours whose width is known: most of a frame's time goes by here."""
        if cells > self.left:
            text = clip(text, self.left, self._glyphs)
            cells = cell_len(text)
        if cells:
            self.segments.append(Segment(text, style))
            self.left -= cells
        return self

    def cell(self, text: str, width: int, style: Style = PLAIN) -> Line:
        """Left-aligned in a cell of its own."""
        text = clip(clean(text), width, self._glyphs)
        return self.add(text + " " * (width - (len(text) if text.isascii() else cell_len(text))), style)

    def pieces(self, pieces: Iterable[tuple[str, Style]], reserve: int = 0) -> Line:
        """As many as have room, with dots between them, and `reserve` cells left."""
        is_first = True
        for text, style in pieces:
            separator = "" if is_first else f" {self._glyphs.dot} "
            if cell_len(separator) + cell_len(text) > self.left - reserve and not is_first:
                break
            self.add(separator, DIM).add(text, style)
            is_first = False
        return self

    def right(self, text: str, style: Style = PLAIN) -> Line:
        """At the right end, if there is room for all of it."""
        cells = cell_len(text)
        if cells < self.left:
            self.add(" " * (self.left - cells)).add(text, style)
        return self

    def styled(self, style: Style) -> Line:
        """All of it, up to the end of the line."""
        self.add(" " * self.left)
        self.segments = [Segment(s.text, style if s.style is None else s.style + style) for s in self.segments]
        return self


@dataclass(frozen=True, slots=True)
class Frame:
    """What the console shows. A rich renderable."""

    lines: Sequence[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        newline = Segment.line()
        for line in self.lines:
            yield from line.segments
            yield newline

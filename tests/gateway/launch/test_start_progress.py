"""The line that says how far a start is."""

from __future__ import annotations

import io
import re

import pytest

from cores.control_messages import GroupState, RankRecord
from gateway.launch.start_progress import BottomLine, NoLine, bottom_line, show_start, start_text


def group(*ranks: tuple[str, float]) -> GroupState:
    return GroupState(tuple(RankRecord(i, 1, state, start_progress=p) for i, (state, p) in enumerate(ranks)))


def test_the_line_tells_ranks_and_weights() -> None:
    text = start_text(group(("ready", 0.0), ("starting", 0.5), ("starting", 0.0), ("starting", 0.5)), 12.4, "smollm2")
    assert text == "starting smollm2  1/4 ranks ready  weights ██████████░░░░░░░░░░  50%  12s"
    assert start_text(group(("starting", 0.0)), 0, "m", "#.").startswith("starting m  0/1 rank ready  weights ....")
    assert start_text(GroupState(()), 0.0, "m").startswith("starting m  0/0 ranks ready")


class Screen(io.StringIO):
    """What a terminal would show."""

    encoding = "utf-8"

    def lines(self) -> list[str]:
        return [re.split("\r\x1b\\[K", line)[-1] for line in self.getvalue().split("\n")]


def test_log_lines_go_above_the_line() -> None:
    screen = Screen()
    line = BottomLine(screen)
    line.show("starting 1")
    line.write("one\n")
    line.show("starting 2")
    line.write("two\nthree\n")
    assert screen.lines() == ["one", "two", "three", "starting 2"]
    line.show("")
    line.write("four\n")
    assert screen.lines() == ["one", "two", "three", "four", ""]


def test_a_line_that_is_written_in_parts_stays_whole() -> None:
    screen = Screen()
    line = BottomLine(screen)
    line.show("starting")
    line.write("half")
    line.show("starting more")
    line.write(" a line\n")
    assert screen.lines() == ["half a line", "starting more"]


def test_the_line_is_not_wider_than_the_terminal() -> None:
    screen = Screen()
    BottomLine(screen).show("x" * 500)
    assert len(screen.lines()[-1]) == 79


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_pipe_never_sees_it(is_wanted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with bottom_line(is_wanted=is_wanted) as line:
        assert isinstance(line, NoLine)
        line.show("starting")
    assert capsys.readouterr() == ("", "")


class Start:
    """Over after the first look."""

    def __init__(self) -> None:
        self._looks = iter([True, False])
        self.group = group(("starting", 0.25))

    @property
    def is_starting(self) -> bool:
        return next(self._looks)


async def test_it_is_gone_when_the_start_is_over() -> None:
    screen = Screen()
    await show_start(BottomLine(screen), Start(), "smollm2")
    assert "0/1 rank ready" in screen.getvalue()
    assert screen.lines() == [""]

"""A child's output: forwarded as long as there is somebody to read it, taken from the child in any case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque

import pytest

from cores.launch.child_process import MAX_LINE_BYTES, forward_lines


async def test_lines_are_forwarded_under_the_childs_name(capsys: pytest.CaptureFixture[str]) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"one\ntwo \xff")
    reader.feed_eof()
    last_lines: deque[str] = deque(maxlen=1)
    await forward_lines(reader, "rank 3", last_lines)
    assert capsys.readouterr().err == "[rank 3] one\n[rank 3] two \\xff\n"
    assert list(last_lines) == ["two \\xff"]


async def test_a_line_without_an_end_comes_in_parts_and_does_not_fill_our_memory(capsys: pytest.CaptureFixture[str]) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"x" * (2 * MAX_LINE_BYTES + 3))
    reader.feed_eof()
    last_lines: deque[str] = deque()
    await forward_lines(reader, "rank 3", last_lines)
    assert [len(line) for line in last_lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 3]
    assert capsys.readouterr().err.count("[rank 3] ") == 3


async def test_a_log_that_nobody_reads_any_more_does_not_hold_up_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    nobody = os.fdopen(writing_end, "w")
    monkeypatch.setattr(sys, "stderr", nobody)
    reader = asyncio.StreamReader()
    reader.feed_data(b"one\n")
    reader.feed_eof()
    last_lines: deque[str] = deque()
    await forward_lines(reader, "rank 3", last_lines)
    assert list(last_lines) == ["one"]
    with contextlib.suppress(BrokenPipeError):
        nobody.close()

"""A child's output: forwarded as long as there is somebody to read it, taken from the child in any case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque

import pytest

from cores.launch.child_process import MAX_LINE_BYTES, forward_lines

DEADLINE_S = 60.0
STOPS_ITSELF = """
import os, signal
from cores.launch.child_process import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
STARTS_IT_AND_WAITS = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE).wait()
"""


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


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such service")
async def test_a_stopped_child_is_no_orphan_after_kill_9_of_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTS_IT_AND_WAITS, STOPS_ITSELF, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), DEADLINE_S))
    child = os.pidfd_open(pid)  # its number may be somebody else's once it is gone
    async with asyncio.timeout(DEADLINE_S):
        while state_of(pid) != "T":
            await asyncio.sleep(0.01)
    parent.kill()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(child, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
    finally:
        asyncio.get_running_loop().remove_reader(child)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
    await parent.wait()


def state_of(pid: int) -> str:
    """As the kernel has it: T is stopped."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

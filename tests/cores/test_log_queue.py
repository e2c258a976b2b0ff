"""A log that nobody reads holds nobody up. Real pipes: what a reader that is slow does, no fake would do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cores.log_queue import MAX_WAITING_CHARS, LogQueue

DEADLINE_S = 60.0
LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def read_until_end(reader: int) -> str:
    with os.fdopen(os.dup(reader), "rb") as stream:
        return stream.read().decode()


def test_lines_come_out_as_they_went_in(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    queue = LogQueue(writer)
    for i in range(100):
        print(f"line {i} ü", file=queue, flush=True)
    assert queue.drain(DEADLINE_S)
    os.close(writer)
    assert read_until_end(reader).splitlines() == [f"line {i} ü" for i in range(100)]


def test_whoever_logs_goes_on_when_nobody_reads_and_what_is_lost_is_counted_and_said(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = pipe
    queue = LogQueue(writer)
    num_written = 4 * MAX_WAITING_CHARS // len(LINE)
    for i in range(num_written):  # without the queue this would hang at the pipe's 64 kB
        queue.write(f"{i:06d}{LINE}")
    assert not queue.drain(0.0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_until_end, reader)
        assert queue.drain(DEADLINE_S)
        os.close(writer)
        lines = reading.result(DEADLINE_S).splitlines()
    assert all(line[6:] + "\n" == LINE for line in lines)
    numbers = [int(line[:6]) for line in lines]
    assert numbers == sorted(set(numbers))
    said = [record for record in caplog.records if "missing before this one" in record.getMessage()]
    num_missing = sum(int(str(record.args[0])) for record in said if isinstance(record.args, tuple))
    assert num_missing == num_written - len(lines) > 0


def test_a_reader_that_is_gone_holds_nobody_up(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    queue = LogQueue(writer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)
    queue.write(LINE)
    assert queue.drain(DEADLINE_S)
    queue.write(LINE)
    assert queue.drain(DEADLINE_S)
    os.close(writer)


def test_last_words_of_a_process_are_read_also_those_of_an_error_that_ends_it() -> None:
    program = (
        "import logging; from cores.log import set_up_logging; from cores.log_queue import unblock_stderr\n"
        "unblock_stderr(); set_up_logging(); logging.info('good bye'); raise SystemError('the end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "good bye" in done.stderr
    assert done.stderr.splitlines()[-1] == "SystemError: the end"


def test_a_process_whose_log_nobody_reads_can_end() -> None:
    program = (
        "import logging; from cores.log import set_up_logging; from cores.log_queue import unblock_stderr\n"
        "unblock_stderr(); set_up_logging()\n"
        "for _ in range(300): logging.info('x' * 1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    assert process.wait(DEADLINE_S) == 0
    assert process.stderr is not None
    process.stderr.close()

"""A child process that is told its task as one JSON line on stdin, and dies with its parent.

Stdin stays open for as long as the parent lives. Its end of file is the one sign of the parent's death that needs no help from
anybody: it also comes after `kill -9`, and no other process can send it by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cores.log import message_of, under_name

NUM_LAST_LINES = 20
MAX_LINE_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
KILL_TIMEOUT_S = 10.0  # a killed process that is still there after this sits in the kernel; nobody can do more


class ChildProcess:
    """One child. Its output goes to our stderr, each line under its name; the last lines are kept for the obituary."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, *, answers: bool) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._process = process
        log = process.stderr if answers else process.stdout
        assert log is not None
        self._forwarding = asyncio.create_task(forward_lines(log, name, self.last_lines))

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        task: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        answers: bool = False,
    ) -> ChildProcess:
        """Runs `python -m module`. With `answers`, what it prints on stdout is for `read_line`; else that is log, too."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Only the launcher may write to our stdout: people parse it.
            stderr=asyncio.subprocess.PIPE if answers else asyncio.subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            pass_fds=pass_fds,
            # Ctrl-C goes to every process of the terminal's foreground group. Only the launcher shall hear it, and drain.
            start_new_session=True,
        )
        child = cls(name, process, answers=answers)
        assert process.stdin is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        try:
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # dead already: `wait` will say how
        except BaseException:
            await child.kill()  # nobody else knows of it
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def write_line(self, line: str) -> None:
        """To its stdin. A child that is dead does not take it: `read_line` will tell."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()

    async def read_line(self) -> str:
        """The next line that it printed; empty when it has closed its stdout."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()

    async def wait(self) -> int:
        """Its exit code, negative for a signal. Everything that it wrote has been forwarded by then."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open. What comes later than this is not the child's own last words.
        await asyncio.wait([self._forwarding], timeout=1.0)
        return code

    def describe_exit(self) -> str:
        """Why it ended, in one line; empty when it ended in order."""
        code = self._process.returncode
        if code == 0:
            return ""
        if code is not None and code < 0:
            return f"process {self.pid} was killed by {signal_name(-code)}"
        last = next((line for line in reversed(self.last_lines) if line.strip()), "")
        return f"process {self.pid} exited with code {code}" + (f": {last.strip()}" if last else "")

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close_stdin(self) -> None:
        """Tells it that the parent is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def end(self, timeout_s: float) -> bool:
        """Waits for an end that was asked for, then kills. True when it ended by itself."""
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
            return True
        except TimeoutError:
            await self.kill()
            return False

    async def kill(self) -> None:
        if self._process.returncode is None:
            self.send_signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), KILL_TIMEOUT_S)
        self._forwarding.cancel()
        self.close_stdin()


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


async def forward_lines(reader: asyncio.StreamReader, name: str, last_lines: deque[str]) -> None:
    """Copies lines to our stderr until the end of file. Very long ones come in parts; what is no text is shown escaped."""
    rest = b""
    while chunk := await reader.read(MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) >= MAX_LINE_BYTES:  # a child that never ends its line must not fill our memory
            lines, rest = [*lines, rest], b""
        _forward_lines(lines, name, last_lines)
    if rest:
        _forward_lines([rest], name, last_lines)


def _forward_lines(lines: list[bytes], name: str, last_lines: deque[str]) -> None:
    texts = [line.decode(errors="backslashreplace") for line in lines]
    last_lines.extend(map(message_of, texts))
    write_lines(texts, name)


def write_lines(texts: Iterable[str], name: str) -> None:
    """To our stderr, each under that name."""
    with contextlib.suppress(OSError):  # nobody reads our log any more, and it is no `LogQueue`
        sys.stderr.write("".join(under_name(name, text) + "\n" for text in texts))
        sys.stderr.flush()


def read_task() -> dict[str, Any]:
    """The child's side of `start`. Raises `ValueError` when there is no JSON object on stdin."""
    line = sys.stdin.buffer.readline()
    if not line.strip():
        raise ValueError("expected one JSON line on stdin: this program is started by `gateway`, not by hand")
    task = json.loads(line)
    if not isinstance(task, dict):
        raise ValueError(f"expected a JSON object on stdin, got {type(task).__name__}")
    return task


def end_with_parent(last_deed: Callable[[], object] | None = None) -> None:
    """The child's side of the open pipe: ends this process at the end of file on stdin, whatever its threads do."""

    def watch() -> None:
        # Not through `sys.stdin`: a daemon thread that holds its lock is a fatal error when the interpreter ends.
        while os.read(0, 4096):
            pass
        if last_deed is not None:
            last_deed()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    if last_deed is None:
        _be_killed_with_parent()


def _be_killed_with_parent() -> None:
    """By the kernel. A process that is stopped (SIGSTOP), or one whose threads never give the interpreter back, reads no end
    of file. The parent's death is that of the thread that started us: launchers do that on their main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


async def parent_died() -> None:
    """The same for a child that ends in order: returns at the end of file on stdin."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()

    def on_readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            gone.set_result(None)

    loop.add_reader(0, on_readable)
    try:
        await gone
    finally:
        loop.remove_reader(0)

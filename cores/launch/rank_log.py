"""A Ray rank's output on its way to the launcher's log: through a named pipe on one node, else over the control socket.

What comes over the socket (`RankLog`) also goes where it went before, which is a file of Ray's on that node. There are the last
lines of a process that was killed before it could send them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from pathlib import Path

import zmq

from cores.codec import encode
from cores.config import EngineLaunch
from cores.control_messages import RankLog, log_identity
from cores.curve import GroupKey
from cores.launch.child_process import MAX_LINE_BYTES, forward_lines, write_lines
from cores.messages import RankId

MAX_QUEUED = 1000  # messages for a launcher that does not read; what comes on top is in the file only
LINGER_MS = 1000


def log_name(rank_id: RankId) -> str:
    return f"rank {rank_id.rank}"


def show(log: RankLog) -> None:
    """In the launcher's own log."""
    write_lines(log.lines, log_name(log.rank_id))


class LogPipe:
    """The launcher's end of a rank's output, on the same node."""

    def __init__(self, path: Path, transport: asyncio.ReadTransport, forwarding: asyncio.Task[None]) -> None:
        self.path = path  # may be unlinked once the writer has opened it
        self._transport = transport
        self._forwarding = forwarding

    @classmethod
    async def open(cls, directory: Path, rank_id: RankId) -> LogPipe:
        """Makes a named pipe there."""
        path = directory / f"rank-{rank_id.rank}-{rank_id.epoch}.log"
        os.mkfifo(path, 0o600)
        reader = asyncio.StreamReader()
        end = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), end)
        return cls(path, transport, asyncio.create_task(forward_lines(reader, log_name(rank_id), deque(maxlen=1))))

    async def drain(self, timeout_s: float) -> None:
        """Waits until the writer is gone and its last line is forwarded."""
        await asyncio.wait({self._forwarding}, timeout=timeout_s)

    def close(self) -> None:
        self._forwarding.cancel()
        self._transport.close()
        self.path.unlink(missing_ok=True)


class LogRelay:
    """Takes over stdout and stderr of this process, from the start to `close`."""

    def __init__(self, launch: EngineLaunch) -> None:
        self._rank_id = RankId(launch.rank, launch.epoch)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, log_identity(self._rank_id))
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        if (key := GroupKey.of(launch.transport)) is not None:
            key.secure_client(self._socket)
        self._socket.connect(launch.control_address)
        self._before = os.dup(1), os.dup(2)
        self._pipe, end = os.pipe()
        os.dup2(end, 1)
        os.dup2(end, 2)
        os.close(end)
        self._thread = threading.Thread(target=self._forward, name="log-relay", daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        rest = b""
        while chunk := os.read(self._pipe, MAX_LINE_BYTES):
            with contextlib.suppress(OSError):  # a full disk there must not stop what goes to the launcher
                os.write(self._before[1], chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._send(lines)
        self._send([rest] if rest else [])

    def _send(self, lines: list[bytes]) -> None:
        if lines:
            texts = tuple(line.decode(errors="backslashreplace") for line in lines)
            with contextlib.suppress(zmq.Again):
                self._socket.send(encode(RankLog(self._rank_id, texts)), zmq.NOBLOCK)

    def close(self) -> None:
        """Gives the streams back; what is under way gets `LINGER_MS`."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._before[0], 1)
        os.dup2(self._before[1], 2)
        self._thread.join(LINGER_MS / 1000)
        if not self._thread.is_alive():  # else a child of this process holds the pipe; the thread keeps the socket
            self._context.destroy(linger=LINGER_MS)

"""The sockets of an engine core process, and the two threads that use them. What the frames mean is the loop's affair.

A socket is used by one thread at a time: a thread has its sockets from its start on, and the control socket is lent to the
input thread until that has ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

import zmq

from cores.codec import MAX_FRAME_BYTES, CodecError, decode, encode
from cores.config import FrontEndAddress
from cores.control_messages import AttachFrontEnd, EngineAlive, LauncherAlive, Shutdown
from cores.curve import GroupKey
from cores.engine_loop import (
    ClientCommand,
    ClientOverflow,
    EngineStatus,
    FrontEndAttached,
    Inbound,
    LastWords,
    LoopTurn,
    Outbound,
    ThreadFailed,
    UtilityReply,
)
from cores.gaps import CommandGaps, numbered
from cores.messages import (
    HEARTBEAT_INTERVAL_S,
    Command,
    EngineCoreDead,
    EngineReady,
    Heartbeat,
    LoadReport,
    RankId,
    UtilityResult,
)
from cores.output_backlog import MAX_BACKLOG_BYTES, OutputBacklog
from cores.report_timer import ReportTimer, View
from cores.words import counted

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # how long last words may take to leave
STOP_CHECK_MS = 100  # how long the input thread sleeps before it looks whether it should end
RETRY_S = 0.01  # between attempts to send to a front end that took nothing
SEND_HIGH_WATER_MARK = 1000  # frames that ZMQ takes for one front end; from there on we count bytes
MAX_FRAMES_PER_POLL = 256  # of one front end, before the next one has its turn
MALFORMED_LOG_INTERVAL_S = 1.0
# A launcher on another node may be gone without a sign, or believe that we are. It has another rank in our place by now, and
# nobody else will end this one. Long enough for a launcher that was stopped for a while, as with Ctrl-Z.
LAUNCHER_TIMEOUT_S = 30.0

Socket = zmq.Socket[bytes]


class Sockets(Protocol):
    """Makes connected sockets. `ZmqSockets`, or a test's fake."""

    def dealer(self, address: str) -> Socket: ...

    def push(self, address: str) -> Socket: ...


class ZmqSockets:
    def __init__(self, rank_id: RankId, key: GroupKey | None = None) -> None:
        """With a key they connect only to who has the same."""
        self._identity = rank_id.identity
        self._key = key
        self._context: zmq.Context[Socket] = zmq.Context()

    def dealer(self, address: str) -> Socket:
        """To a ROUTER, which knows us by our identity. Without high-water marks: what arrives is read at once."""
        sock = self._socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, self._identity)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.connect(address)
        return sock

    def push(self, address: str) -> Socket:
        """To a PULL. With a high-water mark: beyond it the backlog is ours to count."""
        sock = self._socket(zmq.PUSH)
        sock.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        sock.connect(address)
        return sock

    def close(self) -> None:
        """Of all threads the last one. What is still under way gets `LINGER_S`."""
        self._context.destroy(linger=int(LINGER_S * 1e3))

    def _socket(self, kind: int) -> Socket:
        sock: Socket = self._context.socket(kind)
        if self._key is not None:
            self._key.secure_client(sock)
        sock.setsockopt(zmq.LINGER, int(LINGER_S * 1e3))
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        return sock


class LauncherLostError(Exception):
    """Nobody is left who could tell this engine to end."""


class CommandsLostError(Exception):
    """What a front end wants is not known. The engine ends: its requests then go on elsewhere."""


class InputThread(threading.Thread):
    """Says that the engine is ready; from then on decodes and queues what front ends and the launcher send."""

    def __init__(
        self,
        sockets: Sockets,
        inbox: queue.SimpleQueue[Inbound],
        control: Socket,
        front_ends: Iterable[FrontEndAddress],
        ready: EngineReady,
        launcher_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `launcher_timeout_s` the engine ends when it has heard nothing of the launcher for so long."""
        super().__init__(name="engine-input", daemon=True)
        self.num_malformed = 0
        self._sockets = sockets
        self._inbox = inbox
        self._control = control
        self._ready = encode(ready)
        self._by_client = {f.index: sockets.dealer(f.input_address) for f in front_ends}
        self._gaps: defaultdict[int, CommandGaps] = defaultdict(CommandGaps)  # by front end
        self._poller = zmq.Poller()
        self._stopping = threading.Event()
        self._malformed_logged_s = float("-inf")
        self._launcher_timeout_s = launcher_timeout_s
        self._clock = clock
        self._alive = encode(EngineAlive(ready.rank_id))
        self._alive_said_s = float("-inf")
        self._launcher_heard_s = clock()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            self._read_until_stopped()
        except Exception as error:
            self._inbox.put(ThreadFailed(error))

    def _read_until_stopped(self) -> None:
        for sock in (self._control, *self._by_client.values()):
            self._introduce(sock)
        self._launcher_heard_s = self._clock()
        while not self._stopping.is_set():
            ready = dict(self._poller.poll(STOP_CHECK_MS))
            if self._control in ready:
                self._read_control()
            for client, sock in self._by_client.items():
                if sock in ready:
                    self._read_commands(client, sock)
            self._keep_touch(self._clock())

    def _keep_touch(self, now: float) -> None:
        if now - self._alive_said_s >= HEARTBEAT_INTERVAL_S:
            self._alive_said_s = now
            self._control.send(self._alive, zmq.NOBLOCK)
        silent_s = now - self._launcher_heard_s
        if self._launcher_timeout_s is not None and silent_s >= self._launcher_timeout_s:
            raise LauncherLostError(f"nothing was heard of the launcher for {silent_s:.0f} s")

    def _introduce(self, sock: Socket) -> None:
        self._poller.register(sock, zmq.POLLIN)
        sock.send(self._ready, zmq.NOBLOCK)

    def _read_commands(self, client: int, sock: Socket) -> None:
        for frames in _frames(sock):
            try:
                message = _decode_one(frames)
                if not isinstance(message, Command):
                    raise CodecError(f"unexpected {type(message).__name__}")
            except CodecError as error:
                self._note_malformed(f"front end {client}", error)
            else:
                if num_lost := self._gaps[client].num_lost_before(message.seq):
                    lost = counted(num_lost, "command")
                    raise CommandsLostError(f"{lost} of front end {client} got lost: its connection broke")
                self._inbox.put(ClientCommand(client, message))

    def _read_control(self) -> None:
        for frames in _frames(self._control):
            try:
                message = _decode_one(frames)
            except CodecError as error:
                self._note_malformed("the launcher", error)
                continue
            self._launcher_heard_s = self._clock()
            match message:
                case LauncherAlive():
                    pass
                case Shutdown():
                    self._inbox.put(message)
                case AttachFrontEnd(index, input_address, output_address):
                    self._attach(FrontEndAddress(index=index, input_address=input_address, output_address=output_address))
                case _:
                    self._note_malformed("the launcher", CodecError(f"unexpected {type(message).__name__}"))

    def _attach(self, address: FrontEndAddress) -> None:
        """A front end has a new life. Queued before it knows us: its commands come behind the end of its predecessor's."""
        self._inbox.put(FrontEndAttached(address))
        old = self._by_client.pop(address.index, None)
        if old is not None:
            self._poller.unregister(old)
            old.close(linger=0)
        self._by_client[address.index] = self._sockets.dealer(address.input_address)
        self._introduce(self._by_client[address.index])

    def _note_malformed(self, peer: str, error: CodecError) -> None:
        """Counted, and told at most once a second: a broken peer must not fill the disk."""
        self.num_malformed += 1
        now = self._clock()
        if now - self._malformed_logged_s >= MALFORMED_LOG_INTERVAL_S:
            self._malformed_logged_s = now
            logger.warning("dropped a frame from %s (%d malformed so far): %s", peer, self.num_malformed, error)


def _frames(sock: Socket) -> Iterable[list[bytes]]:
    """What has arrived, up to a fair share."""
    for _ in range(MAX_FRAMES_PER_POLL):
        try:
            yield sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _decode_one(frames: list[bytes]) -> object:
    if len(frames) != 1:
        raise CodecError(f"expected one frame, got {len(frames)}")
    return decode(frames[0])


class FrontEndPipe:
    """The way to one front end: its PUSH socket, what waits before it, and what it was last told of the load."""

    def __init__(self, client: int, sock: Socket, max_backlog_bytes: int, now: float) -> None:
        self.client = client
        self.backlog = OutputBacklog(max_backlog_bytes)
        self.timer = ReportTimer(now)
        self._socket = sock
        self._num_sent = 0

    def put(self, frame: bytes) -> bool:
        """True when the backlog has become too long."""
        is_too_long = self.backlog.put(frame)
        self.flush()
        return is_too_long and not self.backlog.is_empty

    def flush(self) -> None:
        self.backlog.flush(self._try_send)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _try_send(self, frame: bytes) -> bool:
        """With its number, so that the front end sees when one is missing."""
        try:
            self._socket.send_multipart(numbered(self._num_sent + 1, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._num_sent += 1
        return True


class OutputThread(threading.Thread):
    """What the loop made, to the front ends, and reports on a timer that needs no step."""

    def __init__(
        self,
        sockets: Sockets,
        rank_id: RankId,
        inbox: queue.SimpleQueue[Inbound],
        outbox: queue.SimpleQueue[Outbound],
        front_ends: Iterable[FrontEndAddress],
        status: EngineStatus,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """`inbox` is the loop's: for a front end that does not read, or our own failure."""
        super().__init__(name="engine-output", daemon=True)
        self._sockets = sockets
        self._rank_id = rank_id
        self._inbox = inbox
        self._outbox = outbox
        self._status, self._status_at_s = status, clock()
        self._clock = clock
        self._sleep = sleep
        self._max_backlog_bytes = max_backlog_bytes
        self._pipes = {f.index: self._make_pipe(f) for f in front_ends}

    def run(self) -> None:
        try:
            self._send_until_last_words()
        except Exception as error:
            self._inbox.put(ThreadFailed(error))

    def _send_until_last_words(self) -> None:
        while True:
            match self._next():
                case LastWords(cause):
                    self._send_last_words(cause)
                    return
                case LoopTurn() as turn:
                    self._send_turn(turn)
                case UtilityReply() as reply:
                    self._put(self._pipes[reply.client], _encode_result(reply))
                case FrontEndAttached(address):
                    self._attach(address)
            self._report()  # after every wake-up: a busy loop cannot starve the timer

    def _next(self) -> Outbound | None:
        """What the loop queued next; None when a report or a retry is due first."""
        now = self._clock()
        due_s = min((self._next_due_s(pipe, now) for pipe in self._pipes.values()), default=now + HEARTBEAT_INTERVAL_S)
        try:
            return self._outbox.get(timeout=max(0.0, due_s - now))
        except queue.Empty:
            return None

    def _next_due_s(self, pipe: FrontEndPipe, now: float) -> float:
        return pipe.timer.next_due_s(self._view(pipe)) if pipe.backlog.is_empty else now + RETRY_S

    def _view(self, pipe: FrontEndPipe) -> View:
        return self._status.command_seqs.get(pipe.client, 0), self._status.load

    def _send_turn(self, turn: LoopTurn) -> None:
        old, self._status, self._status_at_s = self._status, turn.status, self._clock()
        if (old.state, old.weight_version) != (turn.status.state, turn.status.weight_version):
            for pipe in self._pipes.values():  # every front end must know before it reads on
                self._put(pipe, encode(self._make_report("heartbeat", pipe.client)))
        for client, events in turn.cache_events.items():  # before the outputs, which may end what was to store these blocks
            self._put(self._pipes[client], encode(events))
        for client, outputs in turn.outputs.items():
            pipe = self._pipes[client]
            self._put(pipe, encode(outputs))
            pipe.timer.on_told((outputs.command_seq, outputs.load), self._clock())

    def _attach(self, address: FrontEndAddress) -> None:
        """What still waits is for a process that is dead."""
        if address.index in self._pipes:
            self._pipes[address.index].close()
        self._pipes[address.index] = self._make_pipe(address)

    def _make_pipe(self, address: FrontEndAddress) -> FrontEndPipe:
        sock = self._sockets.push(address.output_address)
        return FrontEndPipe(address.index, sock, self._max_backlog_bytes, self._clock())

    def _report(self) -> None:
        for pipe in self._pipes.values():
            pipe.flush()
            if not pipe.backlog.is_empty:
                continue  # it does not read what it has: no reports on top
            kind = pipe.timer.due(self._view(pipe), self._clock())
            if kind is not None:
                self._put(pipe, encode(self._make_report(kind, pipe.client)))

    def _make_report(self, kind: str, client: int) -> Heartbeat | LoadReport:
        status = self._status
        seq = status.command_seqs.get(client, 0)
        age_s = self._clock() - self._status_at_s if status.has_work else 0.0
        if kind == "heartbeat":
            return Heartbeat(
                self._rank_id, status.step, status.has_work, seq, status.load, status.stats, status.state,
                status.weight_version, age_s,
            )  # fmt: skip
        return LoadReport(self._rank_id, status.step, seq, status.load, age_s)

    def _put(self, pipe: FrontEndPipe, frame: bytes) -> None:
        if pipe.put(frame):
            logger.error("front end %d does not read: %d bytes wait for it", pipe.client, pipe.backlog.num_bytes)
            self._inbox.put(ClientOverflow(pipe.client))

    def _send_last_words(self, cause: str) -> None:
        frame = encode(EngineCoreDead(self._rank_id, cause))
        for pipe in self._pipes.values():
            pipe.put(frame)
        deadline_s = self._clock() + LINGER_S
        while any(not pipe.backlog.is_empty for pipe in self._pipes.values()) and self._clock() < deadline_s:
            self._sleep(RETRY_S)
            for pipe in self._pipes.values():
                pipe.flush()


def _encode_result(reply: UtilityReply) -> bytes:
    try:
        return encode(reply.result)
    except (TypeError, ValueError, OverflowError) as error:
        result = reply.result
        message = f"the result cannot be sent: {type(error).__name__}: {error}"
        return encode(UtilityResult(result.rank_id, result.call_id, error=message))

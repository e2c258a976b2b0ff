"""The process around an engine core: sockets, threads, signals and last words.

Theory of operation
-------------------
The input thread reads commands from a DEALER per front end and one to the launcher, and queues them. The loop, in the calling
thread, applies them and steps the engine. The output thread sends what each step made through a PUSH per front end; it needs no
step for heartbeats and load reports, so they go on while a step takes long or never ends. While the model runner computes or
sleeps it holds no lock of the interpreter, and the two threads work beside it.

A socket is used by one thread at a time: this module makes them all, hands them to their thread when it starts, and has the
control socket back once the input thread has ended.

The end, whatever its reason: final outputs, then `EngineCoreDead` as the last frame to everybody, then exit. `run_engine_core`
touches no signal handlers and works in any thread (a Ray actor's); the entry point below adds what a process of our own needs.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

import zmq

from cores.codec import MAX_FRAME_BYTES, CodecError, Message, decode, encode
from cores.config import ConfigError, EngineLaunch, from_plain
from cores.engine_core import EngineCore
from cores.engine_loop import (
    ClientCommand,
    ClientOverflow,
    EngineLoop,
    EngineStatus,
    Inbound,
    LastWords,
    LoopTurn,
    Outbound,
    ThreadFailed,
    UtilityReply,
)
from cores.messages import (
    HEARTBEAT_INTERVAL_S,
    Command,
    EngineCoreDead,
    EngineReady,
    EngineStarting,
    Heartbeat,
    LoadReport,
    RankId,
    RankLoad,
    Shutdown,
    UtilityResult,
)
from cores.output_backlog import MAX_BACKLOG_BYTES, OutputBacklog
from cores.report_timer import ReportTimer
from cores.runner.interface import ModelRunner

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # how long last words may take to leave
STOP_CHECK_MS = 100  # how long the input thread sleeps before it looks whether it should end
RETRY_S = 0.01  # between attempts to send to a front end that took nothing
SEND_HIGH_WATER_MARK = 1000  # frames that ZMQ takes for one front end; from there on we count bytes
MAX_FRAMES_PER_POLL = 256  # of one front end, before the next one has its turn
MALFORMED_LOG_INTERVAL_S = 1.0


def make_runner(launch: EngineLaunch) -> ModelRunner:
    """What computes. Imported only when chosen: torch takes seconds and 200 MB, and the simulated engine needs none of it."""
    if launch.config.engine == "simulated":
        from cores.runner.simulated import SimulatedModelRunner

        return SimulatedModelRunner(launch.config, RankId(launch.rank, launch.epoch))
    from cores.runner.model_runner import TorchModelRunner

    return TorchModelRunner(launch.config, launch.num_threads)


def run_engine_core(launch: EngineLaunch) -> int:
    """One life of one rank, from loading to its last words. Returns the exit code: 0 after an orderly end."""
    return EngineCoreProc(launch).run()


class InputThread(threading.Thread):
    """Frames of the front ends and of the launcher, decoded and queued for the loop."""

    def __init__(
        self, inbox: queue.SimpleQueue[Inbound], control: zmq.Socket[bytes], by_client: dict[int, zmq.Socket[bytes]]
    ) -> None:
        super().__init__(name="engine-input", daemon=True)
        self.num_malformed = 0
        self._inbox = inbox
        self._clients: dict[zmq.Socket[bytes], int | None] = {control: None}
        self._clients |= {sock: client for client, sock in by_client.items()}
        self._stopping = threading.Event()
        self._malformed_logged_s = float("-inf")

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            self._read_until_stopped()
        except Exception as error:
            self._inbox.put(ThreadFailed(error))

    def _read_until_stopped(self) -> None:
        poller = zmq.Poller()
        for sock in self._clients:
            poller.register(sock, zmq.POLLIN)
        while not self._stopping.is_set():
            for sock, _ in poller.poll(STOP_CHECK_MS):
                self._read_some(sock)

    def _read_some(self, sock: zmq.Socket[bytes]) -> None:
        client = self._clients[sock]
        for _ in range(MAX_FRAMES_PER_POLL):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._inbox.put(_inbound(client, frames))
            except CodecError as error:
                self._note_malformed(client, error)

    def _note_malformed(self, client: int | None, error: CodecError) -> None:
        """Counted, and told at most once a second: a broken peer must not fill the disk."""
        self.num_malformed += 1
        now = time.monotonic()
        if now - self._malformed_logged_s >= MALFORMED_LOG_INTERVAL_S:
            self._malformed_logged_s = now
            peer = "the launcher" if client is None else f"front end {client}"
            logger.warning("dropped a frame from %s (%d malformed so far): %s", peer, self.num_malformed, error)


def _inbound(client: int | None, frames: list[bytes]) -> Inbound:
    """Raises `CodecError` for what this peer may not send."""
    if len(frames) != 1:
        raise CodecError(f"expected one frame, got {len(frames)}")
    message = decode(frames[0])
    if client is None and isinstance(message, Shutdown):
        return message
    if client is not None and isinstance(message, Command):
        return ClientCommand(client, message)
    raise CodecError(f"unexpected {type(message).__name__}")


class FrontEndPipe:
    """The way to one front end: its PUSH socket, what waits before it, and what it was last told of the load."""

    def __init__(self, client: int, sock: zmq.Socket[bytes], max_backlog_bytes: int, now: float) -> None:
        self.client = client
        self.backlog = OutputBacklog(max_backlog_bytes)
        self.timer = ReportTimer(now)
        self._socket = sock

    def put(self, frame: bytes) -> bool:
        """True when the backlog has become too long."""
        is_too_long = self.backlog.put(frame)
        self.flush()
        return is_too_long and not self.backlog.is_empty

    def flush(self) -> None:
        self.backlog.flush(self._try_send)

    def _try_send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class OutputThread(threading.Thread):
    """What the loop made, to the front ends, and reports on a timer that needs no step."""

    def __init__(
        self,
        rank_id: RankId,
        inbox: queue.SimpleQueue[Inbound],
        outbox: queue.SimpleQueue[Outbound],
        sockets: dict[int, zmq.Socket[bytes]],
        status: EngineStatus,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        super().__init__(name="engine-output", daemon=True)
        self._rank_id = rank_id
        self._inbox = inbox
        self._outbox = outbox
        self._status = status
        self._clock = clock
        self._sleep = sleep
        self._pipes = {client: FrontEndPipe(client, sock, max_backlog_bytes, clock()) for client, sock in sockets.items()}

    def run(self) -> None:
        try:
            self._send_until_last_words()
        except Exception as error:
            self._inbox.put(ThreadFailed(error))

    def _send_until_last_words(self) -> None:
        while True:
            message = self._next()
            if isinstance(message, LastWords):
                self._send_last_words(message.cause)
                return
            if isinstance(message, LoopTurn):
                self._send_turn(message)
            elif message is not None:
                self._put(self._pipes[message.client], _encode_result(message))
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

    def _view(self, pipe: FrontEndPipe) -> tuple[int, RankLoad]:
        return self._status.command_seqs.get(pipe.client, 0), self._status.load

    def _send_turn(self, turn: LoopTurn) -> None:
        self._status = turn.status
        for client, outputs in turn.outputs.items():
            pipe = self._pipes[client]
            self._put(pipe, encode(outputs))
            pipe.timer.on_told((outputs.command_seq, outputs.load), self._clock())

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
        if kind == "heartbeat":
            return Heartbeat(self._rank_id, status.step, status.has_requests, seq, status.load, status.stats)
        return LoadReport(self._rank_id, status.step, seq, status.load)

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


class EngineCoreProc:
    """Composition root of one engine core process, and its life from start to end."""

    def __init__(self, launch: EngineLaunch, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_loading = True
        self._launch = launch
        self._rank_id = RankId(launch.rank, launch.epoch)
        self._clock = clock
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input_thread: InputThread | None = None
        self._output_thread: OutputThread | None = None

    def request_shutdown(self, timeout_s: float) -> None:
        """Same as the launcher's `Shutdown`. Safe from any thread and from a signal handler."""
        self._inbox.put(Shutdown(timeout_s))

    def run(self) -> int:
        control = self._connect(zmq.DEALER, self._launch.control_address)
        cause = ""
        try:
            self._live(control)
        except ConfigError as error:
            cause = str(error)
            logger.error("%s: %s", self._rank_id, cause)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0] + "\n" + traceback.format_exc().rstrip()
            logger.error("%s died: %s", self._rank_id, cause)
        except SystemExit:
            cause = "told to end while loading"
        self._say_last_words(control, cause)
        return 1 if cause else 0

    def _live(self, control: zmq.Socket[bytes]) -> None:
        """Returns after an orderly end. Whatever it raises is the cause of death."""
        launch = self._launch
        _send(control, EngineStarting(self._rank_id, os.getpid(), f"loading {launch.config.model}"))
        runner = make_runner(launch)
        core = EngineCore(self._rank_id, launch.config, runner.load(), runner, self._clock)
        loop = EngineLoop(core, self._inbox, self._outbox, self._clock)
        inputs = {f.index: self._connect(zmq.DEALER, f.input_address) for f in launch.front_ends}
        outputs = {f.index: self._connect(zmq.PUSH, f.output_address) for f in launch.front_ends}
        self.is_loading = False
        ready = self._make_ready(core)
        for sock in (control, *inputs.values()):
            _send(sock, ready)
        self._input_thread = InputThread(self._inbox, control, inputs)
        self._output_thread = OutputThread(self._rank_id, self._inbox, self._outbox, outputs, loop.status(), self._clock)
        self._input_thread.start()
        self._output_thread.start()
        logger.info("%s is ready: %s", self._rank_id, ready)
        try:
            loop.run()
        finally:
            core.shutdown()

    def _make_ready(self, core: EngineCore) -> EngineReady:
        config, info = self._launch.config, core.info
        return EngineReady(
            rank_id=self._rank_id,
            pid=os.getpid(),
            node=socket.gethostname(),
            device=info.device,
            max_model_len=core.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            block_size=config.block_size,
            num_kv_blocks=info.num_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    def _say_last_words(self, control: zmq.Socket[bytes], cause: str) -> None:
        """To the front ends behind their last outputs, then to the launcher. Bounded; the sockets are closed afterwards."""
        self._outbox.put(LastWords(cause))
        if self._output_thread is not None:
            self._output_thread.join(2 * LINGER_S)
        if self._input_thread is not None:
            self._input_thread.stop()
            self._input_thread.join(2 * LINGER_S)
            if self._input_thread.is_alive():
                return  # it still owns the control socket, which no second thread may touch
        _send(control, EngineCoreDead(self._rank_id, cause))
        if self._output_thread is None or not self._output_thread.is_alive():
            self._context.destroy(linger=int(LINGER_S * 1e3))

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, int(LINGER_S * 1e3))
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if kind == zmq.DEALER:
            sock.setsockopt(zmq.IDENTITY, f"rank-{self._launch.rank}-{self._launch.epoch}".encode())
            sock.setsockopt(zmq.RCVHWM, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
        else:
            sock.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        sock.connect(address)
        return sock


def _send(sock: zmq.Socket[bytes], message: Message) -> None:
    sock.send(encode(message), zmq.NOBLOCK)


# --- a process of our own ---------------------------------------------------------------------------------------------


def main() -> int:
    """Reads its `EngineLaunch` from stdin. Ends at once at the end of file there: then the launcher is dead."""
    launch = from_plain(EngineLaunch, json.loads(sys.stdin.buffer.readline()))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, name="engine-parent-watch", daemon=True).start()
    proc = EngineCoreProc(launch)

    def on_sigterm(_signum: int, _frame: FrameType | None) -> None:
        if proc.is_loading:
            raise SystemExit(1)
        proc.request_shutdown(0.0)

    signal.signal(signal.SIGTERM, on_sigterm)
    # Ctrl-C reaches every process of the terminal's group. Only the launcher answers it, by draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return proc.run()


def _end_with_parent() -> None:
    # Not through sys.stdin: its buffer's lock, held by a daemon thread, would be a fatal error when the interpreter ends.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

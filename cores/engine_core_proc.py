"""The process around an engine core: threads, signals and last words.

Theory of operation
-------------------
The input thread reads commands from a DEALER per front end and one to the launcher, and queues them. The loop, in the calling
thread, applies them and steps the engine. The output thread sends what each step made through a PUSH per front end; it needs no
step for heartbeats and load reports, so they go on while a step takes long or never ends. While the model runner computes or
sleeps it holds no lock of the interpreter, and the two threads work beside it.

The end, whatever its reason: final outputs, then `EngineCoreDead` as the last frame to everybody, then exit. `run_engine_core`
touches no signal handlers and works in any thread (a Ray actor's); `main` adds what a process of our own needs.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import zmq

from cores.codec import encode
from cores.config import ConfigError, EngineLaunch, from_plain
from cores.control_messages import EngineStarting, Shutdown
from cores.curve import GroupKey
from cores.engine_core import EngineCore
from cores.engine_loop import EngineLoop, Inbound, LastWords, Outbound
from cores.engine_sockets import LAUNCHER_TIMEOUT_S, LINGER_S, InputThread, OutputThread, Socket, ZmqSockets
from cores.launch.child_process import end_with_parent, read_task
from cores.log import set_up_logging
from cores.log_queue import drain_stderr, unblock_stderr
from cores.messages import EngineCoreDead, EngineReady, RankId

logger = logging.getLogger(__name__)


def load_core(launch: EngineLaunch, report: Callable[[float], None], clock: Callable[[], float]) -> EngineCore:
    """What computes, loaded; `report` is told how much of the weights is there. Imported only when chosen: torch takes seconds
    and 200 MB, and the simulated engine needs none of it."""
    rank_id, config = RankId(launch.rank, launch.epoch), launch.config
    if config.engine == "vllm":
        from cores.vllm_loader import load_vllm

        return EngineCore(rank_id, config, *load_vllm(config, launch.num_threads), clock)
    if config.engine == "simulated":
        from cores.runner.simulated import SimulatedModelRunner

        simulated = SimulatedModelRunner(config, rank_id)
        return EngineCore(rank_id, config, simulated.load(), simulated, clock)
    from cores.runner.load_progress import watched_loading
    from cores.runner.torch_runner import make_torch_runner

    runner = make_torch_runner(config, launch.num_threads)
    with watched_loading(report):
        info = runner.load()
    return EngineCore(rank_id, config, info, runner, clock)


def run_engine_core(launch: EngineLaunch) -> int:
    """One life of one rank, from loading to its last words. Returns the exit code: 0 after an orderly end."""
    return EngineCoreProc(launch).run()


class EngineCoreProc:
    """Composition root of one engine core process, and its life from start to end."""

    def __init__(self, launch: EngineLaunch, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_loading = True
        self._launch = launch
        self._rank_id = RankId(launch.rank, launch.epoch)
        self._clock = clock
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
        self._sockets = ZmqSockets(self._rank_id, GroupKey.of(launch.transport))
        self._input_thread: InputThread | None = None
        self._output_thread: OutputThread | None = None

    def request_shutdown(self, timeout_s: float) -> None:
        """Same as the launcher's `Shutdown`. Safe from any thread and from a signal handler."""
        self._inbox.put(Shutdown(timeout_s))

    def run(self) -> int:
        control = self._sockets.dealer(self._launch.control_address)
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

    def _live(self, control: Socket) -> None:
        """Returns after an orderly end. Whatever it raises is the cause of death."""
        launch = self._launch
        control.send(encode(EngineStarting(self._rank_id, os.getpid(), f"loading {launch.config.model}")), zmq.NOBLOCK)
        core = load_core(launch, lambda progress: self._tell_progress(control, progress), self._clock)
        core.loras.load_modules(launch.config.lora_modules)
        loop = EngineLoop(core, self._inbox, self._outbox, self._clock)
        self.is_loading = False
        self._start_threads(control, core, loop)
        try:
            loop.run()
        finally:
            core.shutdown()

    def _tell_progress(self, control: Socket, progress: float) -> None:
        control.send(encode(EngineStarting(self._rank_id, os.getpid(), "loading weights", progress)), zmq.NOBLOCK)

    def _start_threads(self, control: Socket, core: EngineCore, loop: EngineLoop) -> None:
        front_ends, ready = self._launch.front_ends, self._make_ready(core)
        # On one node the end of a pipe tells, and at once.
        launcher_timeout_s = None if self._launch.transport.host is None else LAUNCHER_TIMEOUT_S
        self._input_thread = InputThread(
            self._sockets, self._inbox, control, front_ends, ready, launcher_timeout_s, self._clock
        )
        self._output_thread = OutputThread(
            self._sockets, self._rank_id, self._inbox, self._outbox, front_ends, loop.status(), self._clock
        )
        self._output_thread.start()
        self._input_thread.start()
        logger.debug("%s is ready: %s", self._rank_id, ready)

    def _make_ready(self, core: EngineCore) -> EngineReady:
        config, info = self._launch.config, core.info
        return EngineReady(
            rank_id=self._rank_id,
            pid=os.getpid(),
            node=self._launch.node or socket.gethostname(),
            device=info.device,
            max_model_len=core.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            block_size=info.block_size,
            num_kv_blocks=info.num_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            features=info.features,
            supported_tasks=info.supported_tasks,
            embedding_size=info.embedding_size,
            embedding_dimensions=info.embedding_dimensions,
        )

    def _say_last_words(self, control: Socket, cause: str) -> None:
        """To the front ends behind their last outputs, then to the launcher. Bounded; the sockets are closed afterwards."""
        threads: list[threading.Thread] = []
        if self._output_thread is not None and self._input_thread is not None:
            self._outbox.put(LastWords(cause))
            self._output_thread.join(2 * LINGER_S)
            self._input_thread.stop()
            self._input_thread.join(2 * LINGER_S)
            threads = [self._output_thread, self._input_thread]
        if any(thread.is_alive() for thread in threads):
            logger.error("%s: a thread does not end; the process ends without it", self._rank_id)
            return  # it may hold a socket, which no second thread may touch
        control.send(encode(EngineCoreDead(self._rank_id, cause)), zmq.NOBLOCK)
        self._sockets.close()


# --- a process of our own ---------------------------------------------------------------------------------------------


def main() -> int:
    """Reads its `EngineLaunch` from stdin. Ends at once at the end of file there: then the launcher is dead."""
    launch = from_plain(EngineLaunch, read_task())
    unblock_stderr()
    set_up_logging(launch.log_level, launch.log_format)
    end_with_parent()
    proc = EngineCoreProc(launch)

    def on_sigterm(_signum: int, _frame: FrameType | None) -> None:
        if proc.is_loading:
            raise SystemExit(1)
        proc.request_shutdown(0.0)

    signal.signal(signal.SIGTERM, on_sigterm)
    # Ctrl-C reaches every process of the terminal's group. Only the launcher answers it, by draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return proc.run()


def end(code: int) -> NoReturn:
    """Without the interpreter's clean-up: all is said and sent by now. With vLLM in it that took 8 s on a busy machine, and
    whoever waits for a rank's end waits for all of it."""
    drain_stderr()
    os._exit(code)


if __name__ == "__main__":
    end(main())

"""Keeps a front end running: starts it, learns its addresses, restarts it when it crashes. Its death kills no rank."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from cores.config import UNIX_SOCKETS, FrontEndAddress, Transport, to_plain
from cores.control_messages import FrontEndFailed, FrontEndHello, FrontEndReady
from cores.launch.child_process import ChildProcess
from gateway.config import GatewayConfig
from gateway.launch.restart_budget import RestartBudget

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 60.0  # imports and a large tokenizer on a busy machine
MAX_RESTARTS = 5  # within ten minutes
FIRST_BACKOFF_S = 0.5
DRAIN_MARGIN_S = 15.0  # from a front end's last answer to its exit: slow readers have 5 s, then statistics 5 s to be sent

OnHello = Callable[[FrontEndAddress], None]


class FrontEnd(Protocol):
    """A front end of a launcher: a child of it, or its parent."""

    ready: asyncio.Event
    mode: str  # the class of its core client, once it is ready

    def start(self, control_address: str, transport: Transport) -> None: ...

    def on_message(self, message: FrontEndHello | FrontEndReady | FrontEndFailed) -> None: ...

    async def stop(self, timeout_s: float) -> None:
        """Waits for the end that it was asked for, then kills."""
        ...


class ParentFrontEnd:
    """An `AsyncLLM` in a user's script, which has started this launcher: nobody here starts or ends it."""

    def __init__(self, on_hello: OnHello) -> None:
        self.ready = asyncio.Event()
        self.mode = ""
        self._on_hello = on_hello

    def start(self, control_address: str, transport: Transport) -> None:
        self.ready.set()

    def on_message(self, message: FrontEndHello | FrontEndReady | FrontEndFailed) -> None:
        if isinstance(message, FrontEndHello):
            self._on_hello(_address(message))

    async def stop(self, timeout_s: float) -> None:
        pass


class ChildFrontEnd:
    """`on_hello` is called in each of its lives, `fail` when there will be no other."""

    def __init__(
        self,
        index: int,
        config: GatewayConfig,
        listener: socket.socket,
        run_directory: Path,
        url: str,
        on_hello: OnHello,
        fail: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.index = index
        self.ready = asyncio.Event()
        self.mode = ""
        self._config = config
        self._listener = listener
        self._run_directory = run_directory
        self._control_address = ""
        self._transport = UNIX_SOCKETS
        self._url = url
        self._on_hello = on_hello
        self._fail = fail
        self._sleep = sleep
        self._hello: FrontEndHello | None = None
        self._said_hello = asyncio.Event()
        self._last_words = ""  # why this life gives up, in its own words
        self._gave_up = asyncio.Event()
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self, control_address: str, transport: Transport) -> None:
        self._control_address, self._transport = control_address, transport
        self._task = asyncio.create_task(self._run(), name="front end")
        self._task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"front end: {type(error).__name__}: {error}")

    def on_message(self, message: FrontEndHello | FrontEndReady | FrontEndFailed) -> None:
        match message:
            case FrontEndHello():
                self._hello = message
                self._said_hello.set()
            case FrontEndReady(mode=mode):
                logger.info("front end %d serves as %s", self.index, mode)
                self.mode = mode
                self.ready.set()
            case FrontEndFailed(cause=cause) if self.ready.is_set():
                # It has served: what it met now may be gone in its next life. Ranks that serve must not end with it.
                self._last_words = cause
                self._gave_up.set()
            case FrontEndFailed(cause=cause):
                self._stopping = True
                self._fail(cause)

    async def _run(self) -> None:
        budget = RestartBudget(MAX_RESTARTS, FIRST_BACKOFF_S)
        for life in itertools.count(1):
            cause = await self._live(life)
            if self._stopping:
                return
            if not self.ready.is_set():
                self._fail(f"front end {self.index} did not start: {cause}")
                return
            delay_s = budget.take(time.monotonic())
            if delay_s is None:
                self._fail(
                    f"front end {self.index} died more than {MAX_RESTARTS} times within ten minutes, the last time: {cause}"
                )
                return
            logger.error("front end %d died, the ranks go on: %s", self.index, cause)
            await self._sleep(delay_s)

    async def _live(self, life: int) -> str:
        """One life. Returns the cause of its end."""
        self._hello = None
        self._said_hello.clear()
        self._last_words = ""
        self._gave_up.clear()
        try:
            child = self._child = await self._start_child(life)
        except OSError as error:  # no memory, no process, no file or no space left: there may be, later
            return f"it could not be started: {error}"
        hello = await self._await_hello(child)
        if hello is None:
            await child.kill()
            how = child.describe_exit() or f"it did not open its sockets within {HELLO_TIMEOUT_S:g} s"
            return self._last_words or how
        self._on_hello(_address(hello))
        await _wait_for(self._gave_up, child)
        await child.end(DRAIN_MARGIN_S)
        return self._last_words or child.describe_exit() or "it ended without being asked to"

    async def _start_child(self, life: int) -> ChildProcess:
        # A directory for each life: what an engine still sends to the dead one's sockets must not reach its successor.
        directory = self._run_directory / f"fe{self.index}-{life}"
        directory.mkdir(mode=0o700)
        return await ChildProcess.start(
            f"front end {self.index}",
            "gateway.front_end",
            {
                "config": to_plain(self._config),
                "index": self.index,
                "life": life,
                "control_address": self._control_address,
                "transport": to_plain(self._transport),
                "run_directory": str(directory),
                "shared_directory": str(self._run_directory),
                "listener_fd": self._listener.fileno(),
                "url": self._url,
                "log_level": self._config.log_level,
                "log_format": self._config.log_format,
            },
            pass_fds=(self._listener.fileno(),),
        )

    async def _await_hello(self, child: ChildProcess) -> FrontEndHello | None:
        await _wait_for(self._said_hello, child, HELLO_TIMEOUT_S)
        return self._hello

    async def stop(self, timeout_s: float) -> None:
        self._stopping = True
        if self._child is not None and not await self._child.end(timeout_s):
            logger.warning("the front end did not end in time and was killed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._child is not None:
            await self._child.kill()  # a life that began while the one before was waited for


async def _wait_for(event: asyncio.Event, child: ChildProcess, timeout_s: float | None = None) -> None:
    """Or for the child's end."""
    waits: set[asyncio.Task[Any]] = {asyncio.create_task(event.wait()), asyncio.create_task(child.wait())}
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _address(hello: FrontEndHello) -> FrontEndAddress:
    return FrontEndAddress(index=hello.index, input_address=hello.input_address, output_address=hello.output_address)

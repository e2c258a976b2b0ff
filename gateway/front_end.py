"""The front-end process: HTTP server, `AsyncLLM` and nothing else. Started by the launcher, told by one JSON line on stdin.

The HTTP server answers from the first moment, so that `/live` and `/ready` can tell starting from dead. Stdin stays open as
long as the launcher lives: its end is ours, even after a `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
import zmq

from cores.codec import encode
from cores.config import Transport, from_plain
from cores.control_messages import FrontEndFailed, FrontEndReady, front_end_identity
from cores.curve import GroupKey
from cores.launch.child_process import end_with_parent, read_task
from cores.log import set_up_logging
from cores.log_queue import unblock_stderr
from cores.words import counted
from gateway.async_llm import AsyncLLM
from gateway.client_status import starting_snapshot
from gateway.config import ConfigError, GatewayConfig
from gateway.core_client import AsyncMPClient
from gateway.core_client.base import FrontEndPlace
from gateway.endpoint_stores import EndpointStores
from gateway.errors import GatewayError
from gateway.front_end_board import PUBLISH_INTERVAL_S, FrontEndBoard
from gateway.server.app import RunningServer, run_server
from gateway.server.state import ServerState

logger = logging.getLogger("gateway.front_end")  # this file runs as __main__

WATCHDOG_INTERVAL_S = 1.0
WATCHDOG_PATIENCE = 3  # looks: clients of the dead engine get their errors, and a last `/status` its cause
LAST_WORDS_S = 1.0
SLOT_INTERVAL_S = 0.02  # how long a place that is free again may look taken


class FrontEnd:
    """One front end from start to exit code."""

    def __init__(self, config: GatewayConfig, place: FrontEndPlace, shared_directory: Path) -> None:
        self.config = config
        self.place = place
        num_front_ends = config.server.api_server_count
        self.board = FrontEndBoard(shared_directory, place.index, num_front_ends)
        self.stores = EndpointStores.in_directory(shared_directory, place.index, num_front_ends)
        self.state = ServerState(config, board=self.board)
        self.shutdown_ordered: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def order_shutdown(self, timeout_s: float) -> None:
        if not self.shutdown_ordered.done():
            self.shutdown_ordered.set_result(timeout_s)

    async def run(self, listener: socket.socket, *, is_restart: bool) -> int:
        # One that starts again, on a group that serves already, would say "starting" where all is well: clients wait in the
        # listener's queue until it knows better.
        server = None if is_restart else await run_server(self.state, listener)
        try:
            llm = await self._start_engine()
        except (GatewayError, ConfigError) as error:
            logger.error("%s", error)
            self._tell_launcher(str(error))
            return 1
        finally:
            if self.state.engine is None and server is not None:
                await server.stop()
        if llm is None:  # told to stop while starting
            return 0
        return await self._serve(llm, server or await run_server(self.state, listener))

    async def _make_llm(self) -> AsyncLLM:
        return await AsyncLLM.from_config(
            self.config, self.place, self.order_shutdown, self.stores, on_core_client=self._show_start
        )

    def _show_start(self, core_client: AsyncMPClient) -> None:
        """From now on `/status` tells how far the ranks are."""
        core_client.ranks.known_lives = self.board.lives_of
        state = self.state
        state.starting_status = lambda: starting_snapshot(
            core_client, state.served_model_names[0], now=time.monotonic(), started_s=state.started_s
        )

    async def _start_engine(self) -> AsyncLLM | None:
        start = asyncio.create_task(self._make_llm())
        await first_of(start, self.shutdown_ordered)
        if not start.done():
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await start
            return None
        llm = start.result()
        if not self.config.observability.disable_log_stats:
            llm.stats.add("metrics", self.state.metrics)
        self.state.http_tracer = llm.stats.http_tracer
        self.state.engine = llm
        return llm

    async def _serve(self, llm: AsyncLLM, server: RunningServer) -> int:
        llm.core_client.link.send(FrontEndReady(self.place.index, type(llm.core_client).__name__))
        if self.place.life > 1:
            llm.core_client.events.add("restart", None, f"front end {self.place.index} has started again", time.monotonic())
        shared = asyncio.create_task(self._share(llm), name="front-end-board")
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: the collector need not walk it again
        watchdog = asyncio.create_task(self._watch(llm), name="watchdog")
        await first_of(watchdog, shared, self.shutdown_ordered)
        watchdog.cancel()
        if shared.done():
            # Nothing ends it but an error of ours. Without it the others would count what is long gone: better a new life.
            shared.result()
        is_ordered = self.shutdown_ordered.done()
        if not is_ordered:
            self._tell_launcher(str(llm.dead_error))
        await self._stop(llm, server, self.shutdown_ordered.result() if is_ordered else 0.0)
        shared.cancel()
        return 0 if is_ordered else 1

    async def _stop(self, llm: AsyncLLM, server: RunningServer, timeout_s: float) -> None:
        self.state.is_leaving = True
        # Whoever balances over several endpoints learns of it with its next probe. Until then what it sends is served.
        delay_s = min(self.config.server.shutdown_delay, timeout_s)
        if delay_s:
            logger.info("not ready any more; new requests are served for another %g s", delay_s)
            await asyncio.sleep(delay_s)
            timeout_s -= delay_s
        llm.start_draining()
        in_flight = counted(llm.output_processor.num_unfinished, "request")
        logger.info("draining %s for at most %.0f s", in_flight, timeout_s)
        if not await llm.wait_until_idle(timeout_s):
            late = counted(llm.output_processor.num_unfinished, "request")
            logger.warning("not done in time and aborted: %s", late)
            llm.abort_all()
        await server.stop()
        await llm.shutdown()

    async def _watch(self, llm: AsyncLLM) -> None:
        """Returns when the engine has been dead for a few looks and nobody wants the server to outlive it."""
        looks = 0
        while looks < WATCHDOG_PATIENCE or llm.should_keep_api_server_alive:
            await asyncio.sleep(WATCHDOG_INTERVAL_S)
            looks = looks + 1 if llm.errored else 0

    async def _share(self, llm: AsyncLLM) -> None:
        """Keeps the other front ends informed, and our admission slot true."""
        published_s = 0.0
        while True:
            now = time.monotonic()
            llm.refresh_admission()
            if now - published_s >= PUBLISH_INTERVAL_S:
                published_s = now
                await self.state.publish(self.state.own_report())
            await asyncio.sleep(PUBLISH_INTERVAL_S if self.config.server.api_server_count == 1 else SLOT_INTERVAL_S)

    def _tell_launcher(self, cause: str) -> None:
        """Last words, over a line of their own: the core client's may be closed already."""
        if self.place.control_address is None:
            return
        with zmq.Context() as context, context.socket(zmq.DEALER) as control:
            control.setsockopt(zmq.LINGER, int(1000 * LAST_WORDS_S))
            control.setsockopt(zmq.IDENTITY, front_end_identity(self.place.index))
            if (key := GroupKey.of(self.place.transport)) is not None:
                key.secure_client(control)
            control.connect(self.place.control_address)
            control.send(encode(FrontEndFailed(self.place.index, cause)))


async def first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def run_front_end(orders: dict[str, Any]) -> int:
    config = from_plain(GatewayConfig, orders["config"])
    listener = socket.socket(fileno=orders["listener_fd"])
    place = FrontEndPlace(
        index=orders["index"],
        life=orders["life"],
        run_directory=orders["run_directory"],
        control_address=orders["control_address"],
        transport=from_plain(Transport, orders["transport"]),
        url=orders["url"],
        shared_directory=orders["shared_directory"],
    )
    front_end = FrontEnd(config, place, Path(orders["shared_directory"]))
    front_end.board.open()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, front_end.order_shutdown, config.server.shutdown_timeout)
    return await front_end.run(listener, is_restart=orders["life"] > 1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the launcher decides
    orders = read_task()
    end_with_parent()
    unblock_stderr()
    set_up_logging(orders["log_level"], orders["log_format"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one need no pool of a thread per core
    return uvloop.run(run_front_end(orders))


if __name__ == "__main__":
    sys.exit(main())

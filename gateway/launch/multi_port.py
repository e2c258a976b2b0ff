"""`--data-parallel-multi-port-external-lb`: one whole endpoint for each rank, on ports `port + i`, under one supervisor.

Each endpoint is what `gateway serve --data-parallel-external-lb --data-parallel-rank R` is, as a child process. One that ends
before all are ready ends the start. One that ends later is started again on its port, a few times; the others go on meanwhile:
whoever balances over the ports sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cores.config import ConfigError, to_plain
from cores.launch.child_process import ChildProcess
from cores.launch.interface import LaunchError
from cores.launch.rank_environment import Machine, thread_variables
from cores.launch.ray_cluster import EmbeddedRayCluster, use_own_token
from cores.log import set_up_logging
from cores.log_queue import unblock_stderr
from gateway.config import GatewayConfig, ParallelConfig
from gateway.exit_codes import EXIT_FAILED, EXIT_USAGE
from gateway.launch.restart_budget import RestartBudget
from gateway.launch.run_directory import RunDirectory
from gateway.launch.serve import StopSignals, cancelled_at_exit, check_machine, with_model_path
from gateway.launch.service_manager import tell_service_manager

logger = logging.getLogger(__name__)

# What an endpoint needs after its drain, by its own bounds.
STOP_MARGIN_S = 40.0
KILL_TIMEOUT_S = 10.0
MAX_RESTARTS = 5  # of an endpoint, within ten minutes
FIRST_BACKOFF_S = 1.0  # what was killed must be gone from its port


def supervise(config: GatewayConfig) -> int:
    """Runs all endpoints until a signal, or until none is left; returns the exit code."""
    unblock_stderr()
    set_up_logging(config.log_level, config.log_format)
    try:
        check_machine(config)
        endpoints = endpoint_configs(with_model_path(config))
    except ConfigError as error:
        print(f"gateway serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    with RunDirectory() as directory:
        return asyncio.run(_supervise(endpoints, directory.path / "ray"))


def endpoint_configs(config: GatewayConfig) -> list[GatewayConfig]:
    """One for each rank of this node. Raises `ConfigError` for what several endpoints cannot share."""
    ranks = config.parallel.ranks_of_node
    if config.server.uds:
        raise ConfigError("--uds is one socket: several endpoints cannot share it; use --port")
    if config.server.port + len(ranks) - 1 > 65535:
        raise ConfigError(f"--port must be at most {65536 - len(ranks)} for {len(ranks)} endpoints, got {config.server.port}")
    return [_endpoint_config(config, rank, i) for i, rank in enumerate(ranks)]


def _endpoint_config(config: GatewayConfig, rank: int, index: int) -> GatewayConfig:
    port = config.server.port
    return dataclasses.replace(
        config,
        server=dataclasses.replace(config.server, port=port + index if port else 0),
        parallel=dataclasses.replace(
            config.parallel,
            data_parallel_multi_port_external_lb=False,
            data_parallel_external_lb=True,
            data_parallel_rank=rank,
        ),
    )


async def _supervise(configs: list[GatewayConfig], ray_directory: Path) -> int:
    signals = StopSignals()
    asked = asyncio.create_task(signals.asked.wait())
    try:
        with cancelled_at_exit(asked):
            async with _shared_ray(configs, ray_directory, asked) as configs:
                if asked.done():
                    return 0  # nothing has begun that could be stopped
                endpoints = [Endpoint(config, len(configs)) for config in configs]
                for endpoint in endpoints:
                    endpoint.start()
                with cancelled_at_exit(asyncio.create_task(_announce(endpoints))):
                    failed = await _watch(endpoints, asked)
                orderly = await _stop(endpoints, configs[0].server.shutdown_timeout, signals)
                return EXIT_FAILED if failed or not orderly else 0
    except LaunchError as error:
        logger.error("%s", error)
        return EXIT_FAILED


@contextlib.asynccontextmanager
async def _shared_ray(
    configs: list[GatewayConfig], directory: Path, asked: asyncio.Task[bool]
) -> AsyncIterator[list[GatewayConfig]]:
    """One embedded cluster that all endpoints join, where they would start one each. Half a cluster if `asked` comes first."""
    parallel = configs[0].parallel
    if parallel.data_parallel_backend != "ray" or parallel.ray_address is not None:
        yield configs
        return
    use_own_token()
    cluster = EmbeddedRayCluster(directory)
    try:
        logger.info("starting Ray on this machine")
        starting = asyncio.create_task(cluster.start())
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        else:
            starting.result()
        yield [dataclasses.replace(c, parallel=_on_this_node(c.parallel, cluster.address)) for c in configs]
    finally:
        await cluster.stop()


def _on_this_node(parallel: ParallelConfig, ray_address: str) -> ParallelConfig:
    """Nobody else joins a cluster that is ours alone."""
    transport = "ipc" if parallel.data_parallel_transport == "auto" else parallel.data_parallel_transport
    return dataclasses.replace(parallel, ray_address=ray_address, data_parallel_transport=transport)


class Endpoint:
    """One child after the other, on one port. What they print, their ready lines, is printed again."""

    def __init__(self, config: GatewayConfig, num_endpoints: int) -> None:
        self.config = config
        self.rank = config.parallel.ranks[0]
        self.ready = asyncio.Event()  # for the first time
        self.child: ChildProcess | None = None
        self.ended: asyncio.Task[int]
        self._environment = thread_variables(Machine.here(), num_endpoints, os.environ)
        self._budget = RestartBudget(MAX_RESTARTS, FIRST_BACKOFF_S)
        self._stop_signal: int | None = None
        self._told_to_stop = asyncio.Event()

    def start(self, delay_s: float = 0.0) -> None:
        self.ended = asyncio.create_task(self._live(delay_s), name=f"endpoint {self.rank}")

    async def _live(self, delay_s: float) -> int:
        """One life, and its exit code. None of it if the order to stop comes first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told_to_stop.wait(), delay_s)
            return 0
        child = self.child = await ChildProcess.start(
            f"endpoint {self.rank}",
            "gateway.launch",
            {"kind": "endpoint", "config": to_plain(self.config)},
            environment=self._environment,
            answers=True,
        )
        logger.info("endpoint of rank %d started, pid %d", self.rank, child.pid)
        if self._stop_signal is not None:
            child.send_signal(self._stop_signal)
        with cancelled_at_exit(asyncio.create_task(self._repeat(child))):
            return await child.wait()

    async def _repeat(self, child: ChildProcess) -> None:
        while line := await child.read_line():
            print(line, end="", flush=True)
            self.ready.set()

    @property
    def ended_in_order(self) -> bool:
        """Somebody has told this one endpoint to end: for a rolling restart, say."""
        return self.ended.exception() is None and self.ended.result() == 0

    def report(self) -> None:
        if self.ended_in_order:
            logger.info("the endpoint of rank %d has ended in order", self.rank)
            return
        error = self.ended.exception()
        cause = str(error) if error else (self.child and self.child.describe_exit()) or "it ended without being asked to"
        logger.error("the endpoint of rank %d is gone: %s", self.rank, cause)

    def restart(self, now: float) -> bool:
        """False if it may not: too often, or on a port that was picked for it and would be another one. An end by order costs
        nothing of what it may die."""
        take = self._budget.take_free if self.ended_in_order else functools.partial(self._budget.take, now)
        delay_s = take() if self.config.server.port else None
        if delay_s is None:
            return False
        logger.info("the endpoint of rank %d starts again in %g s", self.rank, delay_s)
        self.start(delay_s)
        return True

    def stop(self, number: int) -> None:
        self._stop_signal = number
        self._told_to_stop.set()
        if self.child is not None:
            self.child.send_signal(number)

    async def kill(self) -> None:
        if self.child is not None:
            await self.child.kill()


async def _announce(endpoints: list[Endpoint]) -> None:
    for endpoint in endpoints:
        await endpoint.ready.wait()
    tell_service_manager("READY=1")


async def _watch(endpoints: list[Endpoint], asked: asyncio.Task[bool]) -> bool:
    """Until told to stop, or there is nothing left to watch. True when an endpoint was given up."""
    living = list(endpoints)
    while living:
        await asyncio.wait({asked, *(endpoint.ended for endpoint in living)}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return len(living) < len(endpoints)
        for endpoint in [endpoint for endpoint in living if endpoint.ended.done()]:
            endpoint.report()
            if not all(endpoint.ready.is_set() for endpoint in endpoints):
                logger.error("the start failed: ending all endpoints")
                return True
            if not endpoint.restart(time.monotonic()):
                living.remove(endpoint)
    return True


async def _stop(endpoints: list[Endpoint], drain_timeout_s: float, signals: StopSignals) -> bool:
    """Passes the signal on and waits; a second one, too. True when all ended in order."""
    _signal_all(endpoints, signal.SIGTERM)
    hurry = asyncio.create_task(signals.asked_twice.wait())
    all_ended = asyncio.gather(*(endpoint.ended for endpoint in endpoints), return_exceptions=True)
    with cancelled_at_exit(hurry):
        first: set[asyncio.Future[Any]] = {hurry, all_ended}
        await asyncio.wait(first, timeout=drain_timeout_s + STOP_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
    if not all_ended.done():
        _signal_all(endpoints, signal.SIGTERM)
        await asyncio.wait({all_ended}, timeout=KILL_TIMEOUT_S)
    await asyncio.gather(*(endpoint.kill() for endpoint in endpoints))
    # One that had no handler yet is killed by the signal itself: it had begun nothing.
    return all(code in (0, -signal.SIGTERM) for code in await all_ended)


def _signal_all(endpoints: list[Endpoint], number: int) -> None:
    for endpoint in endpoints:
        endpoint.stop(number)

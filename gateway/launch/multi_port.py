"""`--data-parallel-multi-port-external-lb`: one whole endpoint for each rank, on ports `port + i`, under one supervisor.

Each endpoint is what `gateway serve --data-parallel-external-lb --data-parallel-rank R` is, as a child process. One that ends
before all are ready ends the start; one that ends later is reported, and the others go on: whoever balances over the ports sees
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cores.config import ConfigError, to_plain
from cores.launch.child_process import ChildProcess
from cores.launch.interface import LaunchError
from cores.launch.rank_environment import Machine, thread_variables
from cores.launch.ray_cluster import EmbeddedRayCluster, use_own_token
from cores.log import set_up_logging
from gateway.config import GatewayConfig, ParallelConfig
from gateway.exit_codes import EXIT_FAILED, EXIT_USAGE
from gateway.launch.run_directory import RunDirectory
from gateway.launch.serve import StopSignals, cancelled_at_exit, check_machine, with_model_path

logger = logging.getLogger(__name__)

# What an endpoint needs after its drain, by its own bounds.
STOP_MARGIN_S = 30.0
KILL_TIMEOUT_S = 10.0


def supervise(config: GatewayConfig) -> int:
    """Runs all endpoints until a signal, or until none is left; returns the exit code."""
    set_up_logging(config.log_level)
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
                endpoints = [await Endpoint.start(config, len(configs)) for config in configs]
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
    """One child. What it prints, its ready line, is printed again."""

    def __init__(self, rank: int, child: ChildProcess) -> None:
        self.rank = rank
        self.child = child
        self.is_ready = asyncio.Event()
        self._reading = asyncio.create_task(self._repeat())
        self.ended = asyncio.create_task(child.wait())

    @classmethod
    async def start(cls, config: GatewayConfig, num_endpoints: int) -> Endpoint:
        rank = config.parallel.ranks[0]
        child = await ChildProcess.start(
            f"endpoint {rank}",
            "gateway.launch",
            {"kind": "endpoint", "config": to_plain(config)},
            environment=thread_variables(Machine.here(), num_endpoints, os.environ),
            answers=True,
        )
        logger.info("endpoint of rank %d started, pid %d", rank, child.pid)
        return cls(rank, child)

    async def _repeat(self) -> None:
        while line := await self.child.read_line():
            print(line, end="", flush=True)
            self.is_ready.set()

    def report(self) -> None:
        cause = self.child.describe_exit() or "it ended without being asked to"
        logger.error("the endpoint of rank %d is gone: %s", self.rank, cause)


async def _watch(endpoints: list[Endpoint], asked: asyncio.Task[bool]) -> bool:
    """Until told to stop, or there is nothing left to watch. True when an endpoint ended by itself."""
    living = list(endpoints)
    while living:
        await asyncio.wait({asked, *(endpoint.ended for endpoint in living)}, return_when=asyncio.FIRST_COMPLETED)
        gone = [endpoint for endpoint in living if endpoint.ended.done()]
        if asked.done():
            return len(living) < len(endpoints)
        for endpoint in gone:
            endpoint.report()
            living.remove(endpoint)
        if not all(endpoint.is_ready.is_set() for endpoint in endpoints):
            logger.error("the start failed: ending all endpoints")
            return True
    return True


async def _stop(endpoints: list[Endpoint], drain_timeout_s: float, signals: StopSignals) -> bool:
    """Passes the signal on and waits; a second one, too. True when all ended in order."""
    _signal_all(endpoints, signal.SIGTERM)
    hurry = asyncio.create_task(signals.asked_twice.wait())
    all_ended = asyncio.gather(*(endpoint.ended for endpoint in endpoints))
    with cancelled_at_exit(hurry):
        first: set[asyncio.Future[Any]] = {hurry, all_ended}
        await asyncio.wait(first, timeout=drain_timeout_s + STOP_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
    if not all_ended.done():
        _signal_all(endpoints, signal.SIGTERM)
        await asyncio.wait({all_ended}, timeout=KILL_TIMEOUT_S)
    await asyncio.gather(*(endpoint.child.kill() for endpoint in endpoints))
    # One that had no handler yet is killed by the signal itself: it had begun nothing.
    return all(code in (0, -signal.SIGTERM) for code in await all_ended)


def _signal_all(endpoints: list[Endpoint], number: int) -> None:
    for endpoint in endpoints:
        endpoint.child.send_signal(number)

"""Engine cores as Ray actors (`--data-parallel-backend ray`): in a running cluster, or in an embedded one.

Theory of operation
-------------------
One actor per life of a rank. Its one long method call is the rank's life: the answer to that call is the news of its end, also
when the process is killed (seen after 8-30 ms). Restarts are ours (`max_restarts=0`): with Ray's own, callers see an actor that
is "unavailable" instead of a death with a cause.

Where ranks and front ends meet in a directory, all actors are on this node, and their stdout and stderr go through a named pipe
to the launcher. The same pipe is the actor's life line: when its last reader is gone the launcher is dead, and the actor ends
at once. Ray would end it too, seconds later.

Where they meet over tcp, `ray_nodes` chooses a node for each life and watches it. Output comes over the control socket
(`rank_log`), and an engine that hears nothing of its launcher for half a minute ends by itself. A node that is gone cannot
confirm that its processes are: `kill` then does what it can and returns. One that was lost gets no rank for a while, also
when it answers again (`LostNodes`): Ray may be about to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # there is no public door to it
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cores.config import EngineLaunch, from_plain, to_plain
from cores.launch.interface import LaunchError
from cores.launch.rank_environment import Machine, memory_variables, thread_variables, threads_per_rank
from cores.launch.rank_log import LogPipe, LogRelay
from cores.launch.ray_calls import END_TIMEOUT_S, in_thread, kill_actor
from cores.launch.ray_cluster import EmbeddedRayCluster
from cores.launch.ray_head import HeadWatch
from cores.launch.ray_nodes import (
    LostNodes,
    Node,
    NodeWatch,
    Place,
    Places,
    answers,
    choose_node,
    num_sharing,
    placement_table,
    time_for_process_s,
)
from cores.launch.ray_rank import RayRank
from cores.launch.ray_summary import summary
from cores.log import set_up_logging
from cores.log_queue import drain_stderr, unblock_stderr
from cores.messages import RankId
from cores.words import counted

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
# A new worker process takes 1-2 s; the rest is for busy nodes, and resources that are about to become free.
PLACE_TIMEOUT_S = 120.0
ASK_TIMEOUT_S = 30.0  # Ray answers in milliseconds, on a machine that has some to spare
LOOK_FOR_PLACE_S = 1.0  # between two looks for a node that has room
SAY_NO_PLACE_S = 60.0  # between two lines in the log about it


class EngineCoreActor:
    """The process of one life of one rank. Methods run one after the other (`max_concurrency=1`): with more, Ray runs them in
    threads, and SIGTERM goes unnoticed while one of them runs."""

    def __init__(self, log_pipe: str | None) -> None:
        """`log_pipe` where the launcher is on the same node."""
        if log_pipe is None:
            return
        pipe = os.open(log_pipe, os.O_WRONLY)
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        threading.Thread(target=_end_with_reader, args=(pipe,), name="launcher-watch", daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def run(self, launch: Mapping[str, Any]) -> int:
        from cores.engine_core_proc import run_engine_core

        orders = from_plain(EngineLaunch, dict(launch))
        relay = None if orders.transport.host is None else LogRelay(orders)
        if relay is None:  # a relay reads whatever comes
            unblock_stderr()
        try:
            set_up_logging(orders.log_level, orders.log_format)
            return run_engine_core(orders)
        finally:
            drain_stderr()  # Ray kills the process a moment later
            if relay is not None:
                relay.close()


def _end_with_reader(pipe: int) -> None:
    poller = select.poll()
    poller.register(pipe, 0)  # POLLERR alone: nobody reads any more
    poller.poll()
    os._exit(1)


class RayActorLauncher:
    """`address` of a running cluster, or None for an embedded one that lives as long as this launcher.

    `num_ranks` share this node, or with `spreads` all nodes that Ray may compute on. A rank's first life is placed within
    `place_timeout_s`, a later one within `return_timeout_s`: its node may be gone, and others serve meanwhile.
    """

    def __init__(
        self,
        num_ranks: int,
        run_directory: Path,
        *,
        address: str | None,
        machine: Machine | None = None,
        spreads: bool = False,
        place_timeout_s: float = PLACE_TIMEOUT_S,
        return_timeout_s: float = PLACE_TIMEOUT_S,
    ) -> None:
        self._num_ranks = num_ranks
        self._run_directory = run_directory
        self._spreads = spreads
        self._address = address
        self._machine = machine or Machine.here()
        self._place_timeout_s = place_timeout_s
        self._return_timeout_s = return_timeout_s
        self._places = Places()
        self._lost_nodes = LostNodes()
        self._num_gpus_per_rank: int | None = None  # known with the first rank: a lost node must not turn it to 0
        self._run_id = f"gateway-{secrets.token_hex(4)}"  # in the names of all that we make: leftovers can be found
        self._cluster = None if address else EmbeddedRayCluster(run_directory / "ray")
        self._node_id = ""
        self.host = ""
        self._ranks: list[RayRank] = []
        self._head: HeadWatch | None = None

    async def open(self) -> None:
        if self._cluster is not None:
            logger.info("starting Ray on this machine")
            await self._cluster.start()
        address = self._cluster.address if self._cluster is not None else str(self._address)
        await _check_reachable(address)
        what = f"joining Ray at {address} (a cluster that asks for a token needs RAY_AUTH_MODE and RAY_AUTH_TOKEN here, too)"
        self._node_id, self.host = await in_thread(lambda: _join(address, self._run_id), JOIN_TIMEOUT_S, what)
        _take_signals_back()
        logger.info("joined Ray at %s as %s", address, self._run_id)
        self._head = HeadWatch(str(ray.get_runtime_context().gcs_address))

    async def start(self, launch: EngineLaunch) -> RayRank:
        life = RankId(launch.rank, launch.epoch)
        num_gpus = await in_thread(lambda: self._num_gpus(launch), ASK_TIMEOUT_S, "asking Ray for its resources")
        began_s = time.monotonic()
        place = await self._find_place(life, num_gpus)
        try:
            timeout_s = time_for_process_s(self._timeout_s(life), time.monotonic() - began_s)
            rank = await self._start_on(place, launch, num_gpus, timeout_s)
        except BaseException:
            self._places.give_back(life)
            raise
        self._ranks = [*(r for r in self._ranks if not r.has_ended), rank]
        return rank

    def _num_gpus(self, launch: EngineLaunch) -> int:
        """One for each rank on CUDA. Raises `LaunchError` at once when this node can never have as many."""
        if launch.config.engine == "simulated" or launch.config.device == "cpu":
            return 0
        there = int(sum(node.num_gpus for node in self._nodes()))
        if self._spreads:  # more nodes may come; but none of them decides what the first rank has decided
            if self._num_gpus_per_rank is None:
                self._num_gpus_per_rank = int(there > 0 or launch.config.device == "cuda")
            return self._num_gpus_per_rank
        if there >= self._num_ranks:
            return 1
        if there == 0 and launch.config.device == "auto":
            return 0
        need = counted(self._num_ranks, "rank on this node needs a GPU", "ranks on this node need a GPU each")
        raise LaunchError(f"{need}, Ray has {there}; or use --device cpu")

    async def _find_place(self, life: RankId, num_gpus: int) -> Place:
        """A node, booked for that life, and how many ranks share it. Waits until there is one, bounded."""
        timeout_s = self._timeout_s(life)
        deadline_s, said_s = time.monotonic() + timeout_s, float("-inf")
        while True:
            nodes, faults = await self._look_at_nodes()
            usable = [node for node in nodes if not faults[node.node_id]]
            # No await between choosing and booking: ranks that start together must not choose alike.
            ranks_on = self._places.ranks_on
            node = choose_node(usable, ranks_on, num_gpus=num_gpus) if self._spreads else next(iter(nodes), None)
            if node is not None:
                self._places.take(life, node)
                return Place(node, num_sharing(self._num_ranks, usable, num_gpus=num_gpus))
            table, now = placement_table(nodes, faults, ranks_on, num_gpus=num_gpus), time.monotonic()
            if now >= deadline_s:
                raise LaunchError(f"no node has had room for rank {life.rank} for {timeout_s:g} s\n{table}")
            if now - said_s >= SAY_NO_PLACE_S:
                said_s = now
                logger.warning("%s waits for a node that has room, at most %g s\n%s", life, timeout_s, table)
            await asyncio.sleep(LOOK_FOR_PLACE_S)

    def _timeout_s(self, life: RankId) -> float:
        return self._place_timeout_s if life.epoch == 1 else self._return_timeout_s

    def _nodes(self) -> list[Node]:
        """Those on which ranks may be, as far as Ray says."""
        free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [Node.of(row, free.get(row["NodeID"], {})) for row in rows if row["Alive"]]
        return nodes if self._spreads else [node for node in nodes if node.node_id == self._node_id]

    async def _look_at_nodes(self) -> tuple[list[Node], dict[str, str]]:
        """Those that Ray has, and by node id why one gets no rank now; empty for those that may."""
        nodes = await in_thread(self._nodes, ASK_TIMEOUT_S, "asking Ray for its nodes")
        if not self._spreads:
            return nodes, {node.node_id: "" for node in nodes}
        heard = await asyncio.gather(*map(answers, nodes))
        now = time.monotonic()
        faults = [self._lost_nodes.fault(node.node_id, is_there, now) for node, is_there in zip(nodes, heard, strict=True)]
        return nodes, {node.node_id: fault for node, fault in zip(nodes, faults, strict=True)}

    async def _start_on(self, place: Place, launch: EngineLaunch, num_gpus: int, timeout_s: float) -> RayRank:
        life, node, is_here = RankId(launch.rank, launch.epoch), place.node, place.node.node_id == self._node_id
        machine = self._machine if is_here else Machine(max(1, int(node.num_cpus)), int(node.num_gpus))
        num_threads = threads_per_rank(machine, place.num_sharing, os.environ)
        launch = dataclasses.replace(launch, node=node.name, num_threads=num_threads)
        variables = thread_variables(machine, place.num_sharing, os.environ)
        async with contextlib.AsyncExitStack() as undo:
            log = None
            if launch.transport.host is None:
                log = await LogPipe.open(self._run_directory, life)
                undo.callback(log.close)
            name = f"{self._run_id}-rank-{life.rank}-{life.epoch}"
            pipe = None if log is None else str(log.path)
            options = self._options(name, node, num_gpus, variables)
            actor = await in_thread(lambda: _make_actor(options, pipe), ASK_TIMEOUT_S, "making an actor")
            undo.push_async_callback(kill_actor, actor)
            pid = await self._await_process(actor, life, node, num_gpus, timeout_s)
            if log is not None:
                log.path.unlink()
            undo.pop_all()
            return RayRank(
                actor,
                actor.run.remote(to_plain(launch)),
                pid,
                node,
                watch=None if is_here else NodeWatch(node),
                log=log,
                on_end=lambda: self._places.give_back(life),
                on_node_lost=lambda: self._lost_nodes.note_lost(node.node_id, time.monotonic()),
            )

    @staticmethod
    def _options(name: str, node: Node, num_gpus: int, variables: Mapping[str, str]) -> dict[str, Any]:
        return {
            "name": name,
            # No CPU: Ray would set OMP_NUM_THREADS from it, and refuse a rank where other jobs have booked the cores.
            "num_cpus": 0,
            "num_gpus": num_gpus,
            "max_restarts": 0,
            "max_concurrency": 1,
            # `pip` and the like would need the network; variables need nothing.
            "runtime_env": {"env_vars": {**variables, **memory_variables(os.environ), **_import_path(os.environ)}},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        }

    async def _await_process(self, actor: Any, life: RankId, node: Node, num_gpus: int, timeout_s: float) -> int:
        """Its process id. An actor that nothing has room for waits for ever: hence the bound."""
        rank = life.rank
        try:
            future = asyncio.wrap_future(actor.pid.remote().future())
            return int(await asyncio.wait_for(future, timeout_s))
        except TimeoutError:
            nodes, faults = await self._look_at_nodes()
            table = placement_table(nodes, faults, self._places.ranks_on, num_gpus=num_gpus)
            raise LaunchError(f"Ray has not placed rank {rank} on node {node.name} within {timeout_s:g} s\n{table}") from None
        except RayError as error:
            where = f"rank {rank} on node {node.name}"
            raise LaunchError(f"Ray cannot start a process for {where}: {summary(str(error))}") from error

    async def close(self) -> None:
        await asyncio.gather(*(rank.kill() for rank in self._ranks))
        self._ranks.clear()
        if self._head is not None:
            self._head.close()
        if self._node_id:
            self._node_id = ""
            with contextlib.suppress(LaunchError):
                await in_thread(ray.shutdown, END_TIMEOUT_S, "leaving Ray")
        if self._cluster is not None:
            await self._cluster.stop()


async def _check_reachable(address: str) -> None:
    """Raises `LaunchError` at once where Ray would retry for half a minute."""
    if "://" in address:
        raise LaunchError(f"Ray address {address!r} is a client's; give the cluster's own, HOST:PORT")
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # "auto": Ray looks for a cluster of this machine
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), ASK_TIMEOUT_S)
    except TimeoutError:
        raise LaunchError(f"no answer from Ray at {address} within {ASK_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise LaunchError(f"cannot reach Ray at {address}: {os.strerror(error.errno) if error.errno else error}") from error
    writer.close()


def _join(address: str, namespace: str) -> tuple[str, str]:
    """Connects this process and returns the id of its node, and the address by which the cluster's nodes reach it."""
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that SIGTERM is not its own; we mean that
    ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    own_address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return str(ray.get_runtime_context().get_node_id()), own_address


def _take_signals_back() -> None:
    """Ray's core puts a handler before Python's that prints a stack trace at every SIGTERM. Ours goes first again."""
    if threading.current_thread() is threading.main_thread() and callable(handler := signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, handler)


def _import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Workers must find this package where it is not installed (a checkout): they start in another directory."""
    root = str(Path(__file__).parents[2])
    if "site-packages" in root:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def _make_actor(options: Mapping[str, Any], log_pipe: str | None) -> Any:
    return ray.remote(EngineCoreActor).options(**options).remote(log_pipe)

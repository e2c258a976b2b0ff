"""Engine cores as Ray actors (`--data-parallel-backend ray`): in a running cluster, or in an embedded one.

Theory of operation
-------------------
One actor per life of a rank, on this node (ranks and front end meet in a directory). Its one long method call is the rank's
life: the answer to that call is the news of its end, also when the process is killed (seen after 8-30 ms). Restarts are ours
(`max_restarts=0`): with Ray's own, callers see an actor that is "unavailable" instead of a death with a cause.

The actor's stdout and stderr go through a named pipe to the launcher. The same pipe is its life line: when its last reader is
gone the launcher is dead, and the actor ends at once. Ray would end it too, seconds later.

Every call of Ray's runs in a daemon thread with a bound: a cluster whose head is dead answers after minutes or never, and a
thread that waits for it must not keep the launcher alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cores.config import EngineLaunch, from_plain, to_plain
from cores.launch.child_process import forward_lines
from cores.launch.interface import LaunchError, RankExit
from cores.launch.rank_environment import Machine, memory_variables, thread_variables
from cores.launch.ray_cluster import EmbeddedRayCluster
from cores.log import set_up_logging

logger = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_TIMEOUT_S = 30.0
PLACE_TIMEOUT_S = 60.0  # a new worker process takes 1-2 s; the rest is for resources that are about to become free
ASK_TIMEOUT_S = 30.0  # Ray answers in milliseconds, on a machine that has some to spare
END_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 5.0


class EngineCoreActor:
    """The process of one life of one rank. Methods run one after the other (`max_concurrency=1`): with more, Ray runs them in
    threads, and SIGTERM goes unnoticed while one of them runs."""

    def __init__(self, log_pipe: str) -> None:
        pipe = os.open(log_pipe, os.O_WRONLY)
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        threading.Thread(target=_end_with_reader, args=(pipe,), name="launcher-watch", daemon=True).start()

    def where(self) -> tuple[int, str]:
        return os.getpid(), os.uname().nodename

    def run(self, launch: Mapping[str, Any]) -> int:
        from cores.engine_core_proc import run_engine_core

        orders = from_plain(EngineLaunch, dict(launch))
        set_up_logging(orders.log_level)
        return run_engine_core(orders)


def _end_with_reader(pipe: int) -> None:
    poller = select.poll()
    poller.register(pipe, 0)  # POLLERR alone: nobody reads any more
    poller.poll()
    os._exit(1)


class RayRank:
    """Handle of one life of one rank."""

    def __init__(self, actor: Any, life: Any, pid: int, node: str, log: LogPipe) -> None:
        self.pid: int | None = pid
        self.node = node
        self._actor = actor
        self._process = pid
        self._log = log
        self._end = asyncio.create_task(self._await_end(life))

    async def _await_end(self, life: Any) -> RankExit:
        try:
            code = await asyncio.wrap_future(life.future())
            end = RankExit(f"process {self._process} exited with code {code}" if code else "")
        except RayTaskError as error:
            end = RankExit(f"process {self._process}: {type(error.cause).__name__}: {error.cause}")
        except RayActorError as error:
            end = RankExit(f"process {self._process} was killed or crashed; Ray says: {_summary(str(error))}", abrupt=True)
        except RayError as error:  # the cluster has lost the answer: nothing will be heard of the process again
            end = RankExit(f"process {self._process}: Ray says: {_summary(str(error))}", abrupt=True)
        await self._remove()
        return end

    async def _remove(self) -> None:
        """An actor whose method has returned is idle, not gone."""
        await _kill_actor(self._actor)
        for _ in range(int(GONE_TIMEOUT_S / 0.02)):
            if not _exists(self._process):
                break
            await asyncio.sleep(0.02)
        await self._log.drain(timeout_s=1.0)
        self._log.close()

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    async def wait(self) -> RankExit:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        if not self._end.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)  # it is on this node; `ray.kill` alone takes longer
            await asyncio.wait({self._end}, timeout=END_TIMEOUT_S + GONE_TIMEOUT_S)


class RayActorLauncher:
    """`address` of a running cluster, or None for an embedded one that lives as long as this launcher."""

    def __init__(
        self,
        num_local_ranks: int,
        run_directory: Path,
        *,
        address: str | None,
        machine: Machine | None = None,
        place_timeout_s: float = PLACE_TIMEOUT_S,
    ) -> None:
        self._num_local_ranks = num_local_ranks
        self._run_directory = run_directory
        self._address = address
        self._machine = machine or Machine.here()
        self._place_timeout_s = place_timeout_s
        self._run_id = f"gateway-{secrets.token_hex(4)}"  # in the names of all that we make: leftovers can be found
        self._cluster = None if address else EmbeddedRayCluster(run_directory / "ray")
        self._node_id = ""
        self._ranks: list[RayRank] = []

    async def open(self) -> None:
        if self._cluster is not None:
            logger.info("starting Ray on this machine")
            await self._cluster.start()
        address = self._cluster.address if self._cluster is not None else str(self._address)
        await _check_reachable(address)
        what = f"joining Ray at {address} (a cluster that asks for a token needs RAY_AUTH_MODE and RAY_AUTH_TOKEN here, too)"
        self._node_id = await in_thread(lambda: _join(address, self._run_id), JOIN_TIMEOUT_S, what)
        _take_signals_back()
        logger.info("joined Ray at %s as %s", address, self._run_id)

    async def start(self, launch: EngineLaunch) -> RayRank:
        name = f"{self._run_id}-rank-{launch.rank}-{launch.epoch}"
        pipe = self._run_directory / f"rank-{launch.rank}-{launch.epoch}.log"
        log = await LogPipe.open(pipe, f"rank {launch.rank}")
        actor = None
        try:
            num_gpus = await in_thread(lambda: self._num_gpus(launch), ASK_TIMEOUT_S, "asking Ray for its resources")
            actor = await in_thread(lambda: self._make_actor(name, pipe, num_gpus), ASK_TIMEOUT_S, "making an actor")
            pid, node = await self._place(actor, launch.rank, num_gpus)
        except BaseException:
            log.close()
            await _kill_actor(actor)
            raise
        finally:
            pipe.unlink()
        rank = RayRank(actor, actor.run.remote(to_plain(launch)), pid, node, log)
        self._ranks = [*(r for r in self._ranks if not r.has_ended), rank]
        return rank

    def _num_gpus(self, launch: EngineLaunch) -> int:
        """One for each rank on CUDA. Raises `LaunchError` at once when this node can never have as many."""
        if launch.config.engine != "torch" or launch.config.device == "cpu":
            return 0
        there = int(self._node()["Resources"].get("GPU", 0))
        if there >= self._num_local_ranks:
            return 1
        if there == 0 and launch.config.device == "auto":
            return 0
        raise LaunchError(f"{self._num_local_ranks} ranks on this node need a GPU each, Ray has {there}; or use --device cpu")

    def _make_actor(self, name: str, pipe: Path, num_gpus: int) -> Any:
        variables = thread_variables(self._machine, self._num_local_ranks, os.environ)
        variables |= memory_variables(os.environ) | _import_path(os.environ)
        return (
            ray.remote(EngineCoreActor)
            .options(
                name=name,
                # No CPU: Ray would set OMP_NUM_THREADS from it, and refuse a rank where other jobs have booked the cores.
                num_cpus=0,
                num_gpus=num_gpus,
                max_restarts=0,
                max_concurrency=1,
                # `pip` and the like would need the network; variables need nothing.
                runtime_env={"env_vars": variables},
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=False),
            )
            .remote(str(pipe))
        )

    async def _place(self, actor: Any, rank: int, num_gpus: int) -> tuple[int, str]:
        """Process id and node. An actor that nothing has room for waits for ever: hence the bound."""
        try:
            future = asyncio.wrap_future(actor.where.remote().future())
            pid, node = await asyncio.wait_for(future, self._place_timeout_s)
        except TimeoutError:
            table = await in_thread(self._resource_table, ASK_TIMEOUT_S, "asking Ray for its resources")
            raise LaunchError(
                f"Ray has not placed rank {rank} within {self._place_timeout_s:g} s;"
                f" asked: {num_gpus} GPU on this node; there: {table}"
            ) from None
        except RayError as error:
            raise LaunchError(f"Ray cannot start a process for rank {rank}: {_summary(str(error))}") from error
        return pid, node

    def _node(self) -> Mapping[str, Any]:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return next(node for node in nodes if node["NodeID"] == self._node_id)

    def _resource_table(self) -> str:
        total = self._node()["Resources"]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return ", ".join(f"{kind} {free.get(kind, 0):g} free of {total.get(kind, 0):g}" for kind in ("GPU", "CPU", "memory"))

    async def close(self) -> None:
        await asyncio.gather(*(rank.kill() for rank in self._ranks))
        self._ranks.clear()
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


def _join(address: str, namespace: str) -> str:
    """Connects this process and returns the id of its node."""
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that SIGTERM is not its own; we mean that
    ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    return str(ray.get_runtime_context().get_node_id())


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


class LogPipe:
    """The launcher's end of a rank's output."""

    def __init__(self, transport: asyncio.ReadTransport, forwarding: asyncio.Task[None]) -> None:
        self._transport = transport
        self._forwarding = forwarding

    @classmethod
    async def open(cls, path: Path, name: str) -> LogPipe:
        """Makes the named pipe at `path`. It may be unlinked once the writer has opened it."""
        os.mkfifo(path, 0o600)
        reader = asyncio.StreamReader()
        end = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), end)
        return cls(transport, asyncio.create_task(forward_lines(reader, name, deque(maxlen=1))))

    async def drain(self, timeout_s: float) -> None:
        """Waits until the writer is gone and its last line is forwarded."""
        await asyncio.wait({self._forwarding}, timeout=timeout_s)

    def close(self) -> None:
        self._forwarding.cancel()
        self._transport.close()


async def _kill_actor(actor: Any) -> None:
    if actor is not None:
        with contextlib.suppress(LaunchError):  # dead already, or its cluster is
            await in_thread(lambda: ray.kill(actor), END_TIMEOUT_S, "killing an actor")


async def in_thread(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """The result of a call that may never return. Raises `LaunchError` when the time is over or Ray refuses."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself
        else:
            future.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise LaunchError(f"{what} took longer than {timeout_s:g} s") from None
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"{what} failed: {_summary(str(error))}") from error


def _summary(text: str) -> str:
    """Ray's error texts are long; the facts are in the last sentence but for its list of guesses."""
    detail = text.rpartition("Worker exit detail: ")[2] if "Worker exit detail: " in text else text
    return " ".join(detail.partition(" Some common causes include")[0].split())


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""`gateway serve`, one endpoint: checks, binds, starts, waits for a signal or a failure, and ends. The composition root."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from cores.config import is_loopback
from cores.launch.child_process import parent_died
from cores.log import PrintedLines, logs_json, set_up_logging
from cores.log_queue import unblock_stderr
from gateway.config import ConfigError, GatewayConfig
from gateway.exit_codes import EXIT_FAILED, EXIT_USAGE
from gateway.launch import listener as listening
from gateway.launch.launcher import Launcher, StartError
from gateway.launch.open_files import raise_open_files_limit
from gateway.launch.ranks import make_rank_launcher
from gateway.launch.run_directory import RunDirectory, RunDirectoryError
from gateway.launch.service_manager import tell_service_manager
from gateway.launch.start_progress import StartLine, bottom_line, show_start
from gateway.models import with_absolute_paths

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0


def serve(config: GatewayConfig, *, is_child: bool = False) -> int:
    """Runs one endpoint until a signal or a failure; returns the exit code. A child ends with the end of its stdin, too."""
    unblock_stderr()
    with bottom_line(is_wanted=config.log_format == "text" and not is_child) as line:
        set_up_logging(config.log_level, config.log_format)
        try:
            check_machine(config)
            config = with_model_path(config)
            listener = listening.listen(config.server)
        except ConfigError as error:
            return _refuse(error, EXIT_USAGE)
        except listening.ListenError as error:
            return _refuse(error, EXIT_FAILED)
        raise_open_files_limit()
        stdout = sys.stdout
        try:
            # Ray prints what happens to workers on stdout. People parse ours: the ready line is all that may stand there. What
            # matters of it is known otherwise, and said with the death of a rank.
            ray_says = PrintedLines(logging.getLogger("ray.printed"), logging.DEBUG)
            with RunDirectory() as directory, contextlib.redirect_stdout(ray_says):
                return asyncio.run(_serve(config, listener, directory.path, stdout, line, is_child=is_child))
        except (RunDirectoryError, StartError) as error:
            return _refuse(error, EXIT_FAILED)
        finally:
            listening.close(listener)


def check_machine(config: GatewayConfig) -> None:
    """Raises `ConfigError` for what would be looked for in vain later, when half of everything runs already."""
    parallel = config.parallel
    has_own_engines = parallel.data_parallel_backend == "mp" or parallel.ray_address is None  # else they may be elsewhere
    if config.engine.engine == "torch" and has_own_engines and importlib.util.find_spec("torch") is None:
        raise ConfigError("--engine torch needs the package torch, which is not installed: install dp-gateway[cores]")
    if config.engine.engine == "vllm" and has_own_engines and importlib.util.find_spec("vllm") is None:
        raise ConfigError("--engine vllm needs the package vllm, which is not installed: install dp-gateway[vllm]")
    if parallel.data_parallel_backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--data-parallel-backend ray needs the package ray, which is not installed: install dp-gateway[cores], or use mp"
        )
    if parallel.data_parallel_key_file is not None:
        from cores.curve import GroupKey  # pyzmq's authenticator, which most endpoints do not need

        GroupKey.read(parallel.data_parallel_key_file)
    elif parallel.is_part_of_group and not is_loopback(parallel.data_parallel_address):
        raise ConfigError(
            f"--data-parallel-address {parallel.data_parallel_address} is not a loopback address: endpoints then need a shared"
            " secret, --data-parallel-key-file"
        )
    if config.observability.otlp_traces_endpoint is not None:
        from gateway.stat_loggers import make_tracer  # front ends need what it imports, a launcher does not

        make_tracer(config)
    server = config.server
    files = {"chat-template": server.chat_template, "ssl-certfile": server.ssl_certfile, "ssl-keyfile": server.ssl_keyfile}
    for flag, path in files.items():
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"--{flag}: there is no file {path!r}")


def with_model_path(config: GatewayConfig) -> GatewayConfig:
    """With the model's directory in place of its name, which stays what clients call it. Raises `ConfigError`."""
    names = config.server.served_model_name or (Path(config.engine.model).name,)
    return dataclasses.replace(
        config,
        engine=with_absolute_paths(config.engine),
        server=dataclasses.replace(config.server, served_model_name=names),
    )


def _refuse(error: Exception, code: int) -> int:
    """The last word, for people; in a log that programs read, a line like the others."""
    if logs_json():
        logger.error("%s", error)
    else:
        print(f"gateway serve: {error}", file=sys.stderr)
    return code


async def _serve(
    config: GatewayConfig, listener: socket.socket, run_directory: Path, stdout: TextIO, line: StartLine, *, is_child: bool
) -> int:
    url = listening.url(listener, config.server)
    launcher = Launcher(config, make_rank_launcher(config, run_directory), run_directory, listener, url)

    def announce() -> None:
        line.show("")
        print(f"gateway ready: {url}  mode={launcher.mode}  ranks={len(config.parallel.ranks)}", file=stdout, flush=True)
        if not is_child:  # the supervisor of several endpoints speaks for them
            tell_service_manager("READY=1")

    what = config.server.served_model_name[0]
    with cancelled_at_exit(asyncio.create_task(show_start(line, launcher, what), name="start-progress")):
        return await live(launcher, announce, config.server.shutdown_timeout, ends_with_stdin=is_child)


async def live(launcher: Launcher, announce: Callable[[], None], drain_timeout_s: float, *, ends_with_stdin: bool) -> int:
    """A launcher's life from start to exit code. `announce` is called once it serves."""
    signals = StopSignals()
    orphaned = asyncio.ensure_future(parent_died() if ends_with_stdin else asyncio.Event().wait())
    asked = asyncio.create_task(signals.asked.wait())
    with cancelled_at_exit(orphaned, asked):
        cause = await _until_told_to_stop(launcher, announce, {orphaned, asked})
        drain_s = 0.0 if cause or orphaned.done() else drain_timeout_s
    if not await _stop_or_kill(launcher, drain_s, signals):
        return 128 + signals.last
    if cause:
        # The last words of the log, after those of all that was ended because of it.
        logger.error("%s", cause)
        return EXIT_FAILED
    return 0


async def _until_told_to_stop(launcher: Launcher, announce: Callable[[], None], told: set[asyncio.Future[Any]]) -> str | None:
    """Starts and serves. Returns the cause of a failure, None when it was told to stop."""
    start = asyncio.create_task(launcher.start())
    await asyncio.wait({start, *told}, return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.wait({start})
        return None
    try:
        start.result()
    except StartError as error:
        return str(error)
    announce()
    await asyncio.wait({launcher.failure, *told}, return_when=asyncio.FIRST_COMPLETED)
    return launcher.failure.result() if launcher.failure.done() else None


async def _stop_or_kill(launcher: Launcher, drain_timeout_s: float, signals: StopSignals) -> bool:
    """Stops in order; a second signal ends it at once. True when it was in order."""
    stop = asyncio.create_task(launcher.stop(drain_timeout_s))
    hurry = asyncio.create_task(signals.asked_twice.wait())
    with cancelled_at_exit(stop, hurry):
        await asyncio.wait({stop, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            stop.result()
            return True
    logger.warning("second signal: killing what is left")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(launcher.kill(), KILL_TIMEOUT_S)
    return False


class StopSignals:
    """SIGTERM and SIGINT, counted, on the running loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.asked_twice = asyncio.Event()
        self.last = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.last = number
        if self.asked.is_set():
            self.asked_twice.set()
        else:
            logger.info("%s: stopping; a second signal ends at once", signal.Signals(number).name)
            self.asked.set()


@contextlib.contextmanager
def cancelled_at_exit(*tasks: asyncio.Future[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()

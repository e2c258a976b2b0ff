"""Who gets the statistics of an engine client: plug-ins, `/metrics`, and a line in the log. Several at once.

A plug-in is an entry point of the group `gateway.stat_loggers`: a callable that takes the configuration and the index of the
front end, and gives a `StatLogger`. It turns statistics on, also with `--disable-log-stats`. One that fails is named in the
log, and neither a request nor another logger notices; it must not block, since it runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

from cores.log import is_worth_a_line
from gateway.config import ConfigError, GatewayConfig
from gateway.output_processor import OutputProcessor
from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.status import StatusSnapshot

logger = logging.getLogger(__name__)

PLUGIN_GROUP = "gateway.stat_loggers"
INTERVAL_S = 10.0
CLOSE_TIMEOUT_S = 5.0


class HttpSpan(Protocol):
    """Of one HTTP request. `headers` make what is done for it part of it."""

    headers: dict[str, str]

    def end(self, status: int | None) -> None:
        """None: the client had left."""


class HttpTracer(Protocol):
    def begin_http(self, method: str, route: str, headers: Mapping[str, str]) -> HttpSpan: ...


class StatLogger:
    """What a logger may want to hear. Override what you need: what nobody overrides is not even collected."""

    wants_traces = False  # `FinishedRequest` has `trace_headers` and `stays` only where somebody does something with them
    http_tracer: HttpTracer | None = None  # makes a span of each HTTP request

    def __init__(self, config: GatewayConfig | None = None, front_end_index: int = 0) -> None:
        """What plug-ins are given. A logger that is none may take what it likes."""

    def on_tokens(self, times: TokenTimes) -> None:
        """Once per slice of a rank's outputs: many times a second."""

    def on_finished(self, request: FinishedRequest) -> None:
        """Once per request, however it ended."""

    def on_interval(self, snapshot: StatusSnapshot) -> None:
        """Every ten seconds, and whenever `do_log_stats()` is called."""

    def close(self) -> None:
        """At the end of the engine client, in a thread of its own, which is not waited for much longer than five seconds."""


StatLoggerFactory = Callable[[GatewayConfig, int], StatLogger]


@dataclass(slots=True)
class _Entry:
    name: str
    logger: StatLogger
    num_failures: int = 0

    def hears(self, event: str) -> bool:
        return getattr(type(self.logger), event) is not getattr(StatLogger, event)

    def call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception:  # of somebody else's code: whatever it is, it must not end the output handler
            self.num_failures += 1
            if is_worth_a_line(self.num_failures):
                logger.exception("stat logger %r failed (%d times so far)", self.name, self.num_failures)


class StatLoggers:
    """Of one engine client."""

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs
        self._entries: list[_Entry] = []
        self._for_tokens: list[_Entry] = []
        self._for_finished: list[_Entry] = []
        self._for_interval: list[_Entry] = []
        self._wants_traces = False
        self.http_tracer: HttpTracer | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def wants_traces(self) -> bool:
        return self._wants_traces

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self._entries]

    def add(self, name: str, stat_logger: StatLogger) -> None:
        entry = _Entry(name, stat_logger)
        self._entries.append(entry)
        self._wants_traces = self._wants_traces or stat_logger.wants_traces
        self._outputs.keeps_stays = self._wants_traces
        self.http_tracer = self.http_tracer or stat_logger.http_tracer
        if entry.hears("on_tokens"):
            self._for_tokens.append(entry)
            self._outputs.on_tokens = self._on_tokens
        if entry.hears("on_finished"):
            self._for_finished.append(entry)
            self._outputs.on_finished = self._on_finished
        if entry.hears("on_interval"):
            self._for_interval.append(entry)

    def add_plugins(self, config: GatewayConfig, index: int, plugins: Iterable[metadata.EntryPoint] | None = None) -> None:
        """Those that are installed, or the given ones."""
        for plugin in metadata.entry_points(group=PLUGIN_GROUP) if plugins is None else plugins:
            try:
                stat_logger = plugin.load()(config, index)
                if not isinstance(stat_logger, StatLogger):
                    raise TypeError(f"expected a StatLogger, got a {type(stat_logger).__name__}")
            except Exception:  # of somebody else's code, or its absence
                logger.exception("stat logger %r (%s) cannot be used", plugin.name, plugin.value)
            else:
                logger.info("statistics go to stat logger %r (%s)", plugin.name, plugin.value)
                self.add(plugin.name, stat_logger)

    def start(self, snapshot: Callable[[], StatusSnapshot]) -> None:
        self._ticker = asyncio.create_task(self._tick_for_ever(snapshot), name="stat-loggers")
        self._ticker.add_done_callback(_on_ticker_done)

    def on_interval(self, snapshot: StatusSnapshot) -> None:
        for entry in self._for_interval:
            entry.call(entry.logger.on_interval, snapshot)

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        closing = [entry for entry in self._entries if entry.hears("close")]
        if not closing:
            return
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close_all() -> None:
            for entry in closing:
                entry.call(entry.logger.close)
            with contextlib.suppress(RuntimeError):  # the loop has not waited, and is gone
                loop.call_soon_threadsafe(closed.set)

        # A daemon: one that hangs, in the network say, must hold up neither the loop nor the end of the process.
        threading.Thread(target=close_all, name="stat-loggers-close", daemon=True).start()
        try:
            await asyncio.wait_for(closed.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            names = ", ".join(repr(entry.name) for entry in closing)
            logger.warning("stat loggers %s have not closed within %g s", names, CLOSE_TIMEOUT_S)

    def _on_tokens(self, times: TokenTimes) -> None:
        for entry in self._for_tokens:
            entry.call(entry.logger.on_tokens, times)

    def _on_finished(self, request: FinishedRequest) -> None:
        for entry in self._for_finished:
            entry.call(entry.logger.on_finished, request)

    async def _tick_for_ever(self, snapshot: Callable[[], StatusSnapshot]) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._for_interval:
                self.on_interval(snapshot())


def make_tracer(config: GatewayConfig) -> list[StatLoggerFactory]:
    """One, if a traces endpoint is configured. Raises `ConfigError` if the packages are missing."""
    endpoint = config.observability.otlp_traces_endpoint
    if endpoint is None:
        return []
    try:
        from gateway.tracing import RequestTracer
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed: pip install 'dp-gateway[tracing]' ({error})"
        ) from error
    model = (config.server.served_model_name or (config.engine.model,))[0]
    return [lambda _config, _index: RequestTracer(endpoint, model)]


def _on_ticker_done(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("stat loggers hear no intervals any more; serving goes on", exc_info=error)


class LogLine(StatLogger):
    """What happened since the last line, if anything did. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()
        self._last: StatusSnapshot | None = None

    def on_interval(self, snapshot: StatusSnapshot) -> None:
        now = self._clock()
        text = log_line(self._last, snapshot, now - self._last_s)
        self._last, self._last_s = snapshot, now
        if text is not None:
            logger.info("%s", text)


def log_line(last: StatusSnapshot | None, snapshot: StatusSnapshot, seconds: float) -> str | None:
    """None when nothing was or is under way."""
    before = (0, 0) if last is None else (last.totals.prompt_tokens, last.totals.generation_tokens)
    num_prompt, num_generated = snapshot.totals.prompt_tokens - before[0], snapshot.totals.generation_tokens - before[1]
    in_flight = sum(front_end.in_flight for front_end in snapshot.front_ends)
    if not (num_prompt or num_generated or in_flight) or seconds <= 0:
        return None
    ranks = " · ".join(
        f"rank {rank.rank}: {rank.running} running, {rank.waiting} waiting, KV cache {rank.kv_cache_usage:.0%}"
        for rank in snapshot.ranks
    )
    rates = f"prompt {num_prompt / seconds:.1f} tok/s, generation {num_generated / seconds:.1f} tok/s"
    return f"{rates}, {in_flight} sequences in flight | {ranks}"

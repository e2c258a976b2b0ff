"""What the handlers share. Filled by the composition root: the engine is None until every rank is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import web

from gateway.client_status import balancer_at_start
from gateway.config import GatewayConfig
from gateway.core_client import core_client_class
from gateway.engine_client import EngineClient
from gateway.errors import InvalidRequestError, OverloadedError
from gateway.front_end_board import FrontEndBoard, Posted, Report, whole_endpoint
from gateway.metrics import RequestMetrics
from gateway.server.auth import KeyRing
from gateway.server.orca import OrcaReports
from gateway.server.refusal_log import RefusalLog
from gateway.stat_loggers import HttpTracer
from gateway.status import StatusSnapshot
from gateway.version import __version__

STARTING_RETRY_AFTER_S = 5.0
INFERENCE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})


@dataclass(slots=True)
class ServerState:
    config: GatewayConfig
    engine: EngineClient | None = None
    starting_status: Callable[[], StatusSnapshot] | None = None  # what `/status` says while there is no engine
    metrics: RequestMetrics = field(default_factory=RequestMetrics)  # of this front end
    http_tracer: HttpTracer | None = None
    board: FrontEndBoard | None = None  # where the other front ends of the endpoint are seen
    max_body_bytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 60.0  # for the whole body, from its headers on
    is_leaving: bool = False  # the server will end: not ready, and no connection is kept for a next request
    num_in_flight: int = 0  # inference requests of this server
    busy_connections: set[asyncio.BaseProtocol] = field(default_factory=set)  # those with a request under way
    started_s: float = field(default_factory=time.monotonic)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    refusals: RefusalLog = field(default_factory=RefusalLog)  # for want of room
    refused_keys: RefusalLog = field(default_factory=RefusalLog)
    keys: KeyRing = field(init=False)
    orca: OrcaReports = field(init=False)

    def __post_init__(self) -> None:
        self.keys = KeyRing(self.config.server.api_key)
        self.orca = OrcaReports(self.config.engine.max_num_seqs)

    def require_engine(self) -> EngineClient:
        """Raises `OverloadedError` while the engine is starting."""
        if self.engine is None:
            raise OverloadedError("the server is starting: no engine is ready yet", STARTING_RETRY_AFTER_S)
        return self.engine

    def status(self) -> StatusSnapshot:
        """Of the endpoint: all its front ends together."""
        return self._whole(self._own_status(), self._posted(), time.monotonic())

    def own_report(self) -> Report:
        """Of this front end alone. Without events: the others have a log that is everybody's."""
        snapshot = replace(self._own_status(), events=())
        return Report(time.monotonic(), snapshot, self.metrics.to_plain(), self.num_in_flight)

    async def publish(self, report: Report) -> None:
        """In a thread: replacing a file makes some file systems write it out at once, which held up every stream for
        milliseconds four times a second."""
        if self.board is not None:
            async with self._publishing:
                await asyncio.to_thread(self.board.publish, report)

    def exposition(self, own: Report) -> bytes:
        """The endpoint's `/metrics`, if this is what we know ourselves."""
        posted = self._posted()
        requests = RequestMetrics().plus(report.histograms for report in (own, *posted.all))
        snapshot = self._whole(own.snapshot, posted, own.at_s)
        return requests.render(snapshot, self.config.server.metrics_prefix, time.time())

    def server_load(self) -> int:
        """Inference requests under way, at all front ends."""
        return self.num_in_flight + sum(report.server_load for report in self._posted().others)

    def _whole(self, own: StatusSnapshot, posted: Posted, now: float) -> StatusSnapshot:
        if self.is_leaving:
            own = replace(own, state="draining")
        return own if self.board is None else whole_endpoint(own, posted, now)

    def _posted(self) -> Posted:
        return Posted() if self.board is None else self.board.read()

    def _own_status(self) -> StatusSnapshot:
        if self.engine is not None:
            return self.engine.status()
        if self.starting_status is not None:
            return replace(self.starting_status(), balancer=balancer_at_start(self.config))
        return StatusSnapshot(
            version=__version__,
            mode=core_client_class(self.config).__name__,
            model=self.served_model_names[0],
            uptime_s=round(time.monotonic() - self.started_s, 3),
            state="starting",
            balancer=balancer_at_start(self.config),
        )

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """All names that requests may use; the first is the one that answers carry when a request names none."""
        if self.config.server.served_model_name:
            return self.config.server.served_model_name
        return (self.engine.model_config.name if self.engine is not None else Path(self.config.engine.model).name,)

    def lora_of(self, name: str) -> str | None:
        """The adapter that a resolved model name means; None: the model itself."""
        if self.engine is None or name in self.served_model_names:
            return None
        return None if self.engine.find_lora(name) is None else name

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with. Raises `InvalidRequestError` (404) for a model that is not served here."""
        names = self.served_model_names
        if name is None:
            return names[0]
        if name not in names and self.lora_of(name) is None:
            served = ", ".join(map(repr, names))
            raise InvalidRequestError(
                f"model {name!r} is not served here; served: {served}", "model", status=404, code="model_not_found"
            )
        return name


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
REQUEST_ID = web.RequestKey("request_id", str)
HAS_LEFT = web.RequestKey("has_left", bool)  # the client, while its answer was written
TRACE_HEADERS = web.RequestKey("trace_headers", dict[str, str])  # of the span that the request's are part of

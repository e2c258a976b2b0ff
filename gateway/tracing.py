"""A trace per request, sent to an OTLP collector. Imported only with `--otlp-traces-endpoint`: it needs OpenTelemetry.

A span of the HTTP request, child of the caller's if it sent a trace context. In it one from arrival to end of the generation,
and in that: queue, prefill, decode; a `rank` for each rank that had a sequence, and a `move` from the death of one to the next
token. All but the first are made when the request has ended, from the times that were taken anyway; a thread of OpenTelemetry's
sends them. A token costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.output_statistics import FinishedRequest
from gateway.request_state import RankStay
from gateway.stat_loggers import StatLogger
from gateway.version import __version__

EXPORT_TIMEOUT_S = 5.0  # a collector that does not answer loses spans and nothing else


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of what a request went through."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, int] = field(default_factory=dict)


class HttpSpan:
    """Made by `RequestTracer.begin_http`."""

    def __init__(self, span: Span, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers

    def end(self, status: int | None) -> None:
        if status is None:
            self._span.set_attribute("error.type", "client_left")
        else:
            self._span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class RequestTracer(StatLogger):
    """`clock` is the one of the requests' times."""

    wants_traces = True

    def __init__(
        self, endpoint: str, model: str, clock: Callable[[], float] = time.monotonic, exporter: SpanExporter | None = None
    ) -> None:
        self._clock = clock
        self._model = model
        resource = Resource.create({"service.name": "gateway", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("gateway")
        self._propagator = TraceContextTextMapPropagator()
        self.http_tracer = self

    def begin_http(self, method: str, route: str, headers: Mapping[str, str]) -> HttpSpan:
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        )
        inside: dict[str, str] = {}
        self._propagator.inject(inside, set_span_in_context(span))
        return HttpSpan(span, inside)

    def on_finished(self, request: FinishedRequest) -> None:
        now = self._clock()
        wall_ns = time.time_ns() - int(1e9 * now)  # what turns the clock's seconds into Unix time

        def at(seconds: float) -> int:
            return wall_ns + int(1e9 * seconds)

        end_s = now if request.last_token_s is None or request.finish_reason in ("abort", "error") else request.last_token_s
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(request.trace_headers or {})),
            kind=SpanKind.INTERNAL,
            start_time=at(request.arrival_s),
        )
        self._describe(span, request, end_s)
        inside = set_span_in_context(span)
        for stage in (*stages(request, end_s), *journey(request, end_s)):
            part = self._tracer.start_span(stage.name, inside, start_time=at(stage.start_s), attributes=dict(stage.attributes))
            part.end(end_time=at(stage.end_s))
        span.end(end_time=at(end_s))

    def _describe(self, span: Span, request: FinishedRequest, end_s: float) -> None:
        """With the names that others give these facts."""
        span.set_attributes(
            {
                "gen_ai.request.id": request.external_id,
                "gen_ai.response.model": self._model,
                "gen_ai.request.n": request.num_sequences,
                "gen_ai.response.finish_reasons": (request.finish_reason,),
                "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": request.num_generation_tokens,
                "gen_ai.usage.cached_tokens": request.num_cached_tokens,
                "gen_ai.latency.time_in_queue": request.queued_s,
                "gen_ai.latency.e2e": end_s - request.arrival_s,
                "gateway.internal_id": request.internal_id,
                "gateway.num_moves": request.num_moves,
            }
        )
        if request.rank is not None:
            span.set_attribute("gateway.rank", request.rank)
        if request.first_token_s is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", request.first_token_s - request.arrival_s)
        if request.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def stages(request: FinishedRequest, end_s: float) -> list[Stage]:
    """As far as it came."""
    first_s = request.first_token_s
    if first_s is None:
        return [Stage("queue", request.arrival_s, end_s)]  # or in prefill: nobody has said
    scheduled_s = min(request.arrival_s + request.queued_s, first_s)
    return [
        Stage("queue", request.arrival_s, scheduled_s),
        Stage("prefill", scheduled_s, first_s),
        Stage("decode", first_s, max(first_s, end_s)),
    ]


def journey(request: FinishedRequest, end_s: float) -> Iterator[Stage]:
    """The ranks that had its sequences, and the ways between."""
    left: dict[int, RankStay] = {}  # of a sequence, by handle: where it was before
    for stay in request.stays:
        if (before := left.get(stay.handle)) is not None and before.until_s is not None:
            arrived_s = stay.first_token_s or stay.until_s or end_s
            yield Stage("move", before.until_s, arrived_s, {"gateway.from_rank": before.rank, "gateway.to_rank": stay.rank})
        yield Stage("rank", stay.since_s, max(stay.since_s, stay.until_s or end_s), {"gateway.rank": stay.rank})
        left[stay.handle] = stay

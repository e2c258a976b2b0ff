"""A trace per request, sent to an OTLP collector. Imported only with `--otlp-traces-endpoint`: it needs OpenTelemetry.

One span from arrival to end, child of the caller's if it sent a trace context, and three in it: queue, prefill, decode. They
are made when the request has ended, from the times that were taken anyway; a thread of OpenTelemetry's sends them. While a
request runs, tracing costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.output_processor import FinishedRequest
from gateway.stat_loggers import StatLogger
from gateway.version import __version__

EXPORT_TIMEOUT_S = 5.0  # a collector that does not answer loses spans and nothing else


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

    def on_finished(self, request: FinishedRequest) -> None:
        now = self._clock()
        wall_ns = time.time_ns() - int(1e9 * now)  # what turns the clock's seconds into Unix time

        def at(seconds: float) -> int:
            return wall_ns + int(1e9 * seconds)

        end_s = now if request.last_token_s is None or request.finish_reason in ("abort", "error") else request.last_token_s
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(request.trace_headers or {})),
            kind=SpanKind.SERVER,
            start_time=at(request.arrival_s),
        )
        self._describe(span, request, end_s)
        inside = set_span_in_context(span)
        for name, start_s, stop_s in stages(request, end_s):
            self._tracer.start_span(name, context=inside, start_time=at(start_s)).end(end_time=at(stop_s))
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


def stages(request: FinishedRequest, end_s: float) -> list[tuple[str, float, float]]:
    """Name, begin and end of what a request went through, as far as it came."""
    first_s = request.first_token_s
    if first_s is None:
        return [("queue", request.arrival_s, end_s)]  # or in prefill: nobody has said
    scheduled_s = min(request.arrival_s + request.queued_s, first_s)
    return [
        ("queue", request.arrival_s, scheduled_s),
        ("prefill", scheduled_s, first_s),
        ("decode", first_s, max(first_s, end_s)),
    ]

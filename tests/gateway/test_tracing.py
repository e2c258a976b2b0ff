"""A trace per request: what is in it, whose child it is, and that it reaches a collector over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cores.testing import ManualClock
from gateway.config import ConfigError, GatewayConfig, ObservabilityConfig
from gateway.output_statistics import FinishedRequest
from gateway.request_state import RankStay
from gateway.server.app import create_app, trace
from gateway.server.state import ServerState
from gateway.stat_loggers import make_tracer
from gateway.tracing import RequestTracer, journey
from tests.gateway.otlp_collector import running_collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


def finished(reason: str = "stop", first_s: float | None = 11.5, last_s: float | None = 14.0) -> FinishedRequest:
    return FinishedRequest("mine", "mine-1", reason, 3, 10.0, first_s, last_s, 0.5, 1, 20, 16, 7, 1, HEADERS)


def spans_of(request: FinishedRequest) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer("http://unused", "tiny", ManualClock(15.0), exporter)
    tracer.on_finished(request)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return round((span.end_time - span.start_time) / 1e9, 6)


def test_a_request_is_a_span_of_the_callers_trace_with_its_stages_inside() -> None:
    before_ns = time.time_ns()
    spans = spans_of(finished())
    assert {name: seconds(span) for name, span in spans.items()} == {
        "llm_request": 4.0, "queue": 0.5, "prefill": 1.0, "decode": 2.5,
    }  # fmt: skip
    request = spans["llm_request"]
    assert request.context is not None
    assert format(request.context.trace_id, "032x") == TRACE
    assert request.parent is not None
    assert format(request.parent.span_id, "016x") == SPAN
    for name in ("queue", "prefill", "decode"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == request.context.span_id
    assert request.start_time is not None
    assert before_ns - 5.5e9 < request.start_time < time.time_ns() - 4.5e9  # it came five seconds ago
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.completion_tokens"] == 7
    assert request.attributes["gateway.rank"] == 3
    assert request.attributes["gateway.num_moves"] == 1


def test_ranks_and_the_ways_between_are_spans_of_their_own() -> None:
    stays = (RankStay(1, 3, 10.5, 11.5, 12.0), RankStay(2, 5, 10.5, 11.5), RankStay(1, 4, 12.25, 13.0))
    parts = list(journey(dataclasses.replace(finished(), stays=stays), 14.0))
    assert [(part.name, part.start_s, part.end_s, dict(part.attributes)) for part in parts] == [
        ("rank", 10.5, 12.0, {"gateway.rank": 3}),
        ("rank", 10.5, 14.0, {"gateway.rank": 5}),
        ("move", 12.0, 13.0, {"gateway.from_rank": 3, "gateway.to_rank": 4}),
        ("rank", 12.25, 14.0, {"gateway.rank": 4}),
    ]


@pytest.mark.parametrize(("status", "is_ok"), [(200, True), (404, True), (503, False), (None, False)])
def test_the_http_request_is_around_it_all(status: int | None, is_ok: bool) -> None:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer("http://unused", "tiny", ManualClock(15.0), exporter)
    http = tracer.begin_http("POST", "/v1/completions", HEADERS)
    tracer.on_finished(dataclasses.replace(finished(), trace_headers=http.headers))
    http.end(status)
    tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    outer, request = spans["POST /v1/completions"], spans["llm_request"]
    assert outer.context is not None
    assert outer.parent is not None
    assert request.parent is not None
    assert format(outer.parent.span_id, "016x") == SPAN
    assert request.parent.span_id == outer.context.span_id
    assert format(outer.context.trace_id, "032x") == TRACE
    assert outer.status.is_ok is is_ok
    assert outer.attributes is not None
    assert outer.attributes.get("http.response.status_code") == status


def test_one_that_ended_before_its_first_token_was_only_queued() -> None:
    spans = spans_of(finished("abort", None, None))
    assert {name: seconds(span) for name, span in spans.items()} == {"llm_request": 5.0, "queue": 5.0}


def test_a_failed_one_is_an_error() -> None:
    assert spans_of(finished("error"))["llm_request"].status.is_ok is False
    assert spans_of(finished("stop"))["llm_request"].status.is_ok


def test_a_tracer_is_made_where_an_endpoint_is_configured() -> None:
    assert make_tracer(GatewayConfig()) == []
    config = GatewayConfig(observability=ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces"))
    (factory,) = make_tracer(config)
    tracer = factory(config, 0)
    assert tracer.wants_traces
    tracer.close()


def test_without_an_endpoint_nothing_of_it_is_there() -> None:
    assert trace not in create_app(ServerState(GatewayConfig())).middlewares
    code = "import sys, gateway.front_end; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be an http"):
        ObservabilityConfig(otlp_traces_endpoint="grpc://127.0.0.1:4317")


async def test_spans_reach_a_collector() -> None:
    async with running_collector() as collector:
        tracer = RequestTracer(collector.endpoint, "tiny")
        tracer.on_finished(finished())
        await asyncio.to_thread(tracer.close)
        spans = await collector.spans()
    assert sorted(span.name for span in spans) == ["decode", "llm_request", "prefill", "queue"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def test_a_collector_that_is_not_there_costs_spans_and_nothing_else() -> None:
    tracer = RequestTracer("http://127.0.0.1:9/v1/traces", "tiny")
    tracer.on_finished(finished())
    tracer.close()

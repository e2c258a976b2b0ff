"""A request's trace, from the caller's context to a collector."""

from __future__ import annotations

from gateway.config import ObservabilityConfig
from tests.gateway.otlp_collector import running_collector
from tests.integration.llm_harness import Start, params

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_a_served_request_is_in_the_callers_trace_with_its_stages(start: Start) -> None:
    async with running_collector() as collector:
        llm = await start(1, observability=ObservabilityConfig(otlp_traces_endpoint=collector.endpoint))
        assert await llm.is_tracing_enabled()
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        outputs = [output async for output in llm.generate("one two", params(5), "mine", trace_headers=headers)]
        assert outputs[-1].finished
        await llm.shutdown()  # sends what is left
        spans = {span.name: span for span in await collector.spans()}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode", "rank"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert {span.parent_span_id for name, span in spans.items() if name != "llm_request"} == {spans["llm_request"].span_id}
    attributes = {a.key: a.value for a in spans["llm_request"].attributes}
    assert attributes["gen_ai.request.id"].string_value == "mine"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 5

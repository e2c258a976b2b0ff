"""An OTLP collector over HTTP that keeps what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 60.0


class Collector:
    def __init__(self) -> None:
        self.endpoint = ""
        self._received: asyncio.Queue[ExportTraceServiceRequest] = asyncio.Queue()

    async def on_export(self, request: web.Request) -> web.Response:
        self._received.put_nowait(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    async def spans(self) -> list[Span]:
        """Of the next export."""
        return spans_of(await asyncio.wait_for(self._received.get(), DEADLINE_S))

    def all_spans(self) -> list[Span]:
        """That have come and were not asked for."""
        found: list[Span] = []
        while not self._received.empty():
            found += spans_of(self._received.get_nowait())
        return found


def spans_of(export: ExportTraceServiceRequest) -> list[Span]:
    return [span for resource in export.resource_spans for scope in resource.scope_spans for span in scope.spans]


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.on_export)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield collector
    finally:
        await runner.cleanup()

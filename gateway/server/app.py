"""The application: which routes there are and what surrounds them; and its life on a listening socket."""

from __future__ import annotations

import asyncio
import socket
import ssl

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from gateway.config import ConfigError, ServerConfig
from gateway.metrics import CLIENT_LEFT
from gateway.server.connection import Connection, refuse_early
from gateway.server.cross_origin import add_origin
from gateway.server.edge import add_headers, caller_trace_headers, edge
from gateway.server.routes import (
    admin,
    chat,
    completions,
    development,
    embeddings,
    lora,
    models,
    observation,
    requests,
    responses,
    tokenization,
)
from gateway.server.state import HAS_LEFT, INFERENCE_PATHS, STATE, TRACE_HEADERS, ServerState

BACKLOG = 2048
STOP_TIMEOUT_S = 5.0  # what a reader that is slow with its last answer has


def create_app(state: ServerState) -> web.Application:
    """The handlers find `state` in the application; `state.engine` may still be None."""
    tracing = [trace] if state.config.observability.otlp_traces_endpoint else []
    app = web.Application(middlewares=[count_answers, *tracing, edge, count_in_flight], client_max_size=state.max_body_bytes)
    app[STATE] = state
    for module in (admin, chat, completions, embeddings, lora, models, observation, requests, responses, tokenization):
        app.add_routes(module.routes)
    if state.config.server.dev_mode:
        app.add_routes(development.routes)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(add_origin)
    return app


@web.middleware
async def count_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path not in INFERENCE_PATHS or request.method == "OPTIONS":
        return await handler(request)
    answers = request.app[STATE].metrics.answers
    try:
        response = await handler(request)
    except (asyncio.CancelledError, ClientConnectionResetError):
        answers[CLIENT_LEFT] += 1  # or it was still reading its last answer when the time to stop was over
        raise
    answers[CLIENT_LEFT if request.get(HAS_LEFT) else response.status] += 1
    return response


@web.middleware
async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
    tracer, resource = request.app[STATE].http_tracer, request.match_info.route.resource
    if tracer is None or request.path not in INFERENCE_PATHS or resource is None:
        return await handler(request)
    span = tracer.begin_http(request.method, resource.canonical, caller_trace_headers(request))
    request[TRACE_HEADERS] = span.headers
    status = None
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        span.end(status)


@web.middleware
async def count_in_flight(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path not in INFERENCE_PATHS:
        return await handler(request)
    state = request.app[STATE]
    state.num_in_flight += 1
    try:
        return await handler(request)
    finally:
        state.num_in_flight -= 1


class RunningServer:
    """Made by `run_server`."""

    def __init__(self, runner: web.AppRunner, listener: asyncio.Server) -> None:
        self._runner = runner
        self._listener: asyncio.Server | None = listener

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Accepts nothing more, lets handlers go on for `timeout_s`, then cancels them. Idempotent."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        listener.close()
        server = self._runner.server
        assert server is not None
        server.pre_shutdown()
        await server.shutdown(timeout_s)
        await self._runner.cleanup()


async def run_server(state: ServerState, sock: socket.socket) -> RunningServer:
    """`sock` is bound (TCP or Unix); it is closed when the server stops. Raises `ConfigError` for unusable TLS files."""
    ssl_context = make_ssl_context(state.config.server)
    # A client that goes away cancels its handler, which closes the generator, which aborts the request in its engine.
    runner = web.AppRunner(create_app(state), handler_cancellation=True)
    await runner.setup()
    server = runner.server
    assert server is not None
    server.request_handler = refuse_early(server.request_handler, state)
    # What aiohttp's own site does, but for the class of the connections.
    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), sock=sock, ssl=ssl_context, backlog=BACKLOG
    )
    return RunningServer(runner, listener)


def make_ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Raises `ConfigError` naming the file that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"{config.ssl_certfile}, {config.ssl_keyfile}"
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: cannot use {files}: {error}") from error
    return context

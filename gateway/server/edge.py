"""The outermost layer of every request: its id, its key, and an OpenAI-shaped answer for whatever goes wrong inside."""

from __future__ import annotations

import logging
import time
import uuid

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from gateway.errors import InvalidRequestError, OverloadedError
from gateway.server.cross_origin import preflight
from gateway.server.failure import Failure, to_failure
from gateway.server.last_answer import LastAnswer
from gateway.server.orca import FORMAT_HEADER, METRICS_HEADER, known_format
from gateway.server.state import REQUEST_ID, STATE
from gateway.version import __version__

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
MAX_ID_LENGTH = 256
PLAIN_ID = f"1 to {MAX_ID_LENGTH} printable ASCII characters"
LOAD_FORMAT = web.RequestKey("load_format", str)  # in which the caller asks for our load
SERVER_NAME = f"gateway/{__version__}"


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    busy_connections = request.app[STATE].busy_connections
    busy_connections.add(request.protocol)
    try:
        request[REQUEST_ID] = _request_id(request)
        if (answer := preflight(request)) is not None:
            return answer
        _authorize(request)
        if (load_format := request.headers.get(FORMAT_HEADER)) is not None:
            request[LOAD_FORMAT] = known_format(load_format)
        return await handler(request)
    except ClientConnectionResetError:
        raise  # nobody is left to be told
    except Exception as error:
        failure = to_failure(error, f"{request.method} {_path(request)}")
        _log(request, failure, error)
        return LastAnswer(failure, request.protocol) if failure.leaves_body else failure.response()
    finally:
        busy_connections.discard(request.protocol)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal and no line of `edge`: the headers of a stream are gone before its handler returns."""
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    response.headers["Server"] = SERVER_NAME
    if request.app[STATE].is_leaving:
        # A proxy that keeps the connection would send its next request into the end of it.
        response.force_close()
        response.headers["Connection"] = "close"
    if load_format := request.get(LOAD_FORMAT):
        state = request.app[STATE]
        response.headers[METRICS_HEADER] = state.orca.header(load_format, state.status)


def _request_id(request: web.Request) -> str:
    """The caller's id if it can be echoed. Raises `InvalidRequestError`."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is None:
        return uuid.uuid4().hex
    if not is_plain_id(given):
        request[REQUEST_ID] = uuid.uuid4().hex
        raise InvalidRequestError(f"{REQUEST_ID_HEADER} must be {PLAIN_ID}", REQUEST_ID_HEADER)
    return given


def is_plain_id(text: str) -> bool:
    """Whether an id that a client made up can be sent on and written into a log."""
    return 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable()


def caller_trace_headers(request: web.Request) -> dict[str, str]:
    """The caller's W3C trace context."""
    return {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}


def _authorize(request: web.Request) -> None:
    if not request.app[STATE].keys.admits(request.path, request.headers.get("Authorization")):
        raise InvalidRequestError(
            "missing or wrong API key; send the header 'Authorization: Bearer KEY'", status=401, code="invalid_api_key"
        )


def _log(request: web.Request, failure: Failure, error: Exception) -> None:
    """One line per failed request, but of those that come again and again; a traceback only for our own bugs."""
    level = logging.ERROR if failure.is_bug else logging.WARNING if failure.status >= 500 else logging.INFO
    text = one_line(str(error) if failure.is_bug else failure.message)
    state = request.app[STATE]
    refusals = state.refusals if isinstance(error, OverloadedError) else state.refused_keys if failure.status == 401 else None
    if refusals is not None:
        num_untold = refusals.note(time.monotonic())
        level = logging.DEBUG if num_untold is None else level
        text += f"; {num_untold} more were refused since the last such line" if num_untold else ""
    logger.log(
        level, "request %s: %s %s failed: %d %s", request[REQUEST_ID], request.method, _path(request), failure.status, text,
        exc_info=error if failure.is_bug else None, extra={"request_id": request[REQUEST_ID]},
    )  # fmt: skip


def _path(request: web.Request) -> str:
    """As it was sent: decoded, it may hold line breaks and terminal escapes, and a client could write lines of our log."""
    return request.rel_url.raw_path


def one_line(text: str) -> str:
    """The same for what a client has sent otherwise."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)

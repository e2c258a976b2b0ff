"""The outermost layer of every request: its id, its key, and an OpenAI-shaped answer for whatever goes wrong inside."""

from __future__ import annotations

import logging
import uuid

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from gateway.errors import InvalidRequestError
from gateway.server.failure import Failure, to_failure
from gateway.server.state import REQUEST_ID, STATE
from gateway.version import __version__

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
MAX_REQUEST_ID_LENGTH = 256
SERVER_NAME = f"gateway/{__version__}"


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    busy_connections = request.app[STATE].busy_connections
    busy_connections.add(request.protocol)
    try:
        request[REQUEST_ID] = _request_id(request)
        _authorize(request)
        return await handler(request)
    except ClientConnectionResetError:
        raise  # nobody is left to be told
    except Exception as error:
        failure = to_failure(error, f"{request.method} {request.path}")
        _log(request, failure, error)
        return failure.response()
    finally:
        busy_connections.discard(request.protocol)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal and no line of `edge`: the headers of a stream are gone before its handler returns."""
    # aiohttp refuses an unknown `Expect` by itself: then `edge` has not seen the request.
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID) or uuid.uuid4().hex
    response.headers["Server"] = SERVER_NAME


def _request_id(request: web.Request) -> str:
    """The caller's id if it can be echoed. Raises `InvalidRequestError`."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is None:
        return uuid.uuid4().hex
    if not (0 < len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable()):
        request[REQUEST_ID] = uuid.uuid4().hex
        raise InvalidRequestError(
            f"{REQUEST_ID_HEADER} must be 1 to {MAX_REQUEST_ID_LENGTH} printable ASCII characters", REQUEST_ID_HEADER
        )
    return given


def _authorize(request: web.Request) -> None:
    if not request.app[STATE].keys.admits(request.path, request.headers.get("Authorization")):
        raise InvalidRequestError(
            "missing or wrong API key; send the header 'Authorization: Bearer KEY'", status=401, code="invalid_api_key"
        )


def _log(request: web.Request, failure: Failure, error: Exception) -> None:
    """One line per failed request; a traceback only for our own bugs."""
    level = logging.ERROR if failure.is_bug else logging.WARNING if failure.status >= 500 else logging.INFO
    text = str(error) if failure.is_bug else failure.message
    logger.log(
        level, "request %s: %s %s failed: %d %s", request[REQUEST_ID], request.method, request.path, failure.status, text,
        exc_info=error if failure.is_bug else None,
    )  # fmt: skip

"""One client's connection: what is refused before it is a request of the application, by HTTP's rules or by its head alone.

aiohttp would answer the former in plain text without an id, and the latter when the whole body has come.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong

from gateway.errors import InvalidRequestError
from gateway.server.content_encoding import ENCODINGS, body_too_large
from gateway.server.edge import REQUEST_ID_HEADER, SERVER_NAME, is_plain_id, one_line
from gateway.server.failure import Failure, to_failure
from gateway.server.last_answer import LastAnswer
from gateway.server.state import INFERENCE_PATHS, ServerState

logger = logging.getLogger(__name__)

# nginx takes 8 KiB for a line and 32 in all, Apache 8 for a field, Node 16 in all, Envoy 60. A token full of group names and a
# trace's baggage fill 8 KiB; nothing that we serve has a long target. Before a key is checked one client can make us hold
# the product of the last two: 4 MiB.
MAX_TARGET_BYTES = 8 * 1024
MAX_FIELD_BYTES = 32 * 1024
MAX_FIELDS = 128
KEEPALIVE_TIMEOUT_S = 75.0  # of an idle connection, from its first byte on; longer than usual proxies keep theirs

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    __slots__ = ()

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # none, as aiohttp's runner says it
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            max_line_size=MAX_TARGET_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_FIELDS,
            auto_decompress=False,
        )

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Called for what could not be parsed, and for bugs outside of `edge`."""
        if isinstance(exc, HttpProcessingError):
            return _refuse(request, malformed(exc))
        return super().handle_error(request, status, exc, message)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._fail_broken_body()

    def _fail_broken_body(self) -> None:
        """What follows a body that has not ended is aiohttp's note that its chunks are broken. It waits behind the request that
        waits for the rest of them."""
        request = self._current_request
        if request is not None and not request.content.is_eof() and request.content.exception() is None:
            request.content.set_exception(web.RequestPayloadError("its chunks are malformed"))


def refuse_early(handle: Handle, state: ServerState) -> Handle:
    """In front of aiohttp's application, which says `100 Continue` before any middleware is asked."""

    def check(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        error = flaw_of_head(request, state.max_body_bytes)
        if error is None:
            return handle(request)
        failure = to_failure(error)
        if request.path in INFERENCE_PATHS:
            state.metrics.answers[failure.status] += 1
        return _refused(request, failure)

    return check


def flaw_of_head(request: web.BaseRequest, max_body_bytes: int) -> Exception | None:
    """Why no body needs to be read. Once per request."""
    headers, version = request.headers, request.version
    if version != HttpVersion11 and version != HttpVersion10:
        return InvalidRequestError(f"HTTP/{version.major}.{version.minor} is not spoken here; HTTP/1.1 is", status=505)
    if request.method == "CONNECT":
        return NotImplementedError("CONNECT: this is no proxy")
    expectation = headers.get("Expect")
    if expectation and expectation.lower() != "100-continue" and version == HttpVersion11:
        return InvalidRequestError(f"Expect must be '100-continue', got {expectation!r}", "Expect", status=417)
    encoding = ", ".join(headers.getall("Content-Encoding", ()))
    if encoding and encoding.lower() not in ENCODINGS:
        allowed = ", ".join(ENCODINGS)
        return InvalidRequestError(
            f"Content-Encoding must be one of {allowed}, got {encoding!r}", "Content-Encoding", status=415
        )  # fmt: skip
    if (request.content_length or 0) > max_body_bytes:
        return body_too_large(max_body_bytes)
    return None


def malformed(error: HttpProcessingError) -> Failure:
    """Tells nothing of what was sent: there may be a key in it, and the log gets this too."""
    reason = " ".join(_QUOTED.split(error.message)[0].split()).rstrip(":")
    match error:
        case LineTooLong(args=(_, limit, _)) if limit == MAX_TARGET_BYTES:
            return _invalid(414, f"the request's target is longer than {MAX_TARGET_BYTES} bytes", code="target_too_long")
        case LineTooLong():
            return _invalid(431, f"a header field is larger than {MAX_FIELD_BYTES} bytes", code="headers_too_large")
        case InvalidURLError():
            reason = "Invalid target"
    if reason == "Too many headers received":
        return _invalid(431, f"there are more than {MAX_FIELDS} header fields", code="headers_too_large")
    return _invalid(400, f"this is no valid HTTP/1.1 request: {reason}", code="malformed_request")


_QUOTED = re.compile(r"""\b(?:bytearray\()?b['"]""")  # how aiohttp's messages show the bytes


def _invalid(status: int, message: str, code: str) -> Failure:
    return to_failure(InvalidRequestError(message, status=status, code=code))


async def _refused(request: web.BaseRequest, failure: Failure) -> web.StreamResponse:
    return _refuse(request, failure)


def _refuse(request: web.BaseRequest, failure: Failure) -> web.StreamResponse:
    request_id = request.headers.get(REQUEST_ID_HEADER, "")
    if not is_plain_id(request_id):
        request_id = uuid.uuid4().hex
    told = request_id, request.remote or "a client", failure.status, one_line(failure.message)
    logger.info("request %s: refused what %s sent: %d %s", *told, extra={"request_id": request_id})
    answer = LastAnswer(failure, request.protocol)
    answer.headers[REQUEST_ID_HEADER] = request_id
    answer.headers["Server"] = SERVER_NAME
    return answer

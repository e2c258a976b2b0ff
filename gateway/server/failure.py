"""What a client is told when something goes wrong: one HTTP status and one OpenAI-shaped error. Pure; writes no response."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
from aiohttp import web

from cores.sampling_params import InvalidParameterError
from gateway.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineGenerateError,
    InvalidRequestError,
    OverloadedError,
)

INVALID_REQUEST = "invalid_request_error"
# What the engine client knows as an argument, and says so, a caller over HTTP has said in a header.
HEADER_OF = {"data_parallel_rank": "X-data-parallel-rank"}
DEAD_ENGINE_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """`type` says whose fault it is, `code` what exactly, `param` which field."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    is_bug: bool = False  # ours: the log gets the traceback, the client only the request id
    allow: str | None = None  # methods, with 405

    @property
    def leaves_body(self) -> bool:
        """Some of the body was not read, or nobody knows where it ends: the connection is of no more use."""
        return self.status in (408, 413) or self.code == "invalid_body"

    def document(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.document()})

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", charset="utf-8", headers=self.headers()
        )

    def event(self) -> bytes:
        """The last event of a stream that had begun."""
        return b"data: " + self.body() + b"\n\n"


def to_failure(error: Exception, route: str = "") -> Failure:
    """Every exception that reaches the edge of the server, as a failure. `route` is what was asked for."""
    match error:
        case InvalidRequestError(param=param) if param in HEADER_OF:
            header = HEADER_OF[param]
            return Failure(error.status, INVALID_REQUEST, str(error).replace(param, header), header, error.code)
        case InvalidRequestError():
            return Failure(error.status, INVALID_REQUEST, str(error), error.param, error.code)
        case InvalidParameterError():
            return Failure(400, INVALID_REQUEST, str(error), error.param)
        case OverloadedError():
            return Failure(503, "overloaded_error", str(error), code="overloaded", retry_after_s=error.retry_after_s)
        case DeadlineExceededError():
            return Failure(504, "timeout_error", str(error), code="deadline_exceeded")
        case EngineGenerateError():
            return Failure(500, "engine_error", str(error), code="engine_generate_error")
        case EngineDeadError():
            retry_after_s = DEAD_ENGINE_RETRY_AFTER_S
            return Failure(503, "engine_error", str(error), code="engine_dead", retry_after_s=retry_after_s)
        case NotImplementedError():
            return Failure(501, "not_implemented_error", str(error), code="not_implemented")
        case web.HTTPException():
            return _from_http_exception(error, route)
    return Failure(500, "internal_error", "internal error; the server's log has the details", code="internal", is_bug=True)


def _from_http_exception(error: web.HTTPException, route: str) -> Failure:
    """aiohttp's own refusals: its router's 404 and 405, the body limit's 413, and unreadable bodies."""
    match error:
        case web.HTTPNotFound():
            return Failure(404, INVALID_REQUEST, f"there is no route {route}", code="unknown_route")
        case web.HTTPMethodNotAllowed():
            allow = ", ".join(sorted(error.allowed_methods))
            message = f"{route} is not allowed; allowed: {allow}"
            return Failure(405, INVALID_REQUEST, message, code="method_not_allowed", allow=allow)
        case web.HTTPRequestEntityTooLarge():
            return Failure(413, INVALID_REQUEST, f"the body is too large: {error.text}", code="body_too_large")
    return Failure(error.status, INVALID_REQUEST if error.status < 500 else "internal_error", error.text or error.reason)

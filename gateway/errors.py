"""What can go wrong, whose fault it is and what the caller may do next. The HTTP layer maps each type to one status.

GatewayError
├── InvalidRequestError      the request: 400, or the status it carries (404 unknown model, 413 too large)
├── OverloadedError          us, for now: 503 with Retry-After
├── DeadlineExceededError    waited in the queue past its deadline: 504
├── EngineGenerateError      this request alone: 500, the next one may work
└── EngineDeadError          a rank or the whole engine: 503
"""

from __future__ import annotations


class GatewayError(Exception):
    """Base of all errors that a caller of `EngineClient` may see."""


class InvalidRequestError(GatewayError):
    """The request cannot be served as it stands. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class OverloadedError(GatewayError):
    """Nothing is wrong with the request; there is no room, or the server is starting, paused or draining."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(GatewayError):
    """The request's deadline passed before a rank took it."""


class EngineGenerateError(GatewayError):
    """Recoverable: this request failed inside an engine that lives on."""


class EngineDeadError(GatewayError):
    """Unrecoverable for this request: the rank that held it, or the last rank, is dead. `rank` is None for all of them."""

    def __init__(self, message: str, rank: int | None = None, cause: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause

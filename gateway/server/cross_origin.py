"""Web pages of other origins that may ask from a browser (CORS). None may, unless the operator names them: a page that somebody
has open could otherwise use a server on their machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from gateway.server.state import STATE

METHODS = "GET, POST, DELETE"
PREFLIGHT_MAX_AGE_S = 600
READABLE_HEADERS = "X-Request-Id, X-Gateway-Rank, Retry-After"  # by the page's scripts, besides those that always are


def preflight(request: web.Request) -> web.Response | None:
    """The answer to a browser that asks whether it may ask, which it does without a key; None to everybody else."""
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or asked is None or _origin(request) is None:
        return None
    headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S)}
    if wanted := request.headers.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = wanted  # the key's, and clients add theirs: none means harm to us
    return web.Response(status=204, headers=headers)


async def add_origin(request: web.Request, response: web.StreamResponse) -> None:
    """A signal: every answer says so, errors and streams, too."""
    if (origin := _origin(request)) is None:
        return
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Access-Control-Expose-Headers"] = READABLE_HEADERS
    response.headers["Vary"] = "Origin"


def _origin(request: web.Request) -> str | None:
    return allowed_origin(request.app[STATE].config.server.allowed_origins, request.headers.get("Origin"))


def allowed_origin(allowed: Sequence[str], origin: str | None) -> str | None:
    """The origin as it is to be named in the answer; None for a page that may not ask, and for who is no browser."""
    return origin if origin is not None and ("*" in allowed or origin in allowed) else None

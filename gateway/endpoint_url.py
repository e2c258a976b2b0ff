"""Endpoints as people name them, `http://HOST:PORT` or `unix:PATH` (what `--uds` is shown as), and how aiohttp reaches them."""

from __future__ import annotations

import os

import aiohttp

UNIX_PREFIX = "unix:"


def socket_path(url: str) -> str | None:
    """None where it is no Unix socket. `unix:///run/gateway.sock` is the same as `unix:/run/gateway.sock`."""
    if not url.startswith(UNIX_PREFIX):
        return None
    path = url.removeprefix(UNIX_PREFIX)
    return path.removeprefix("//") if path.startswith("///") else path


def http_base(url: str) -> str:
    """What paths are appended to. Behind a Unix socket the host says nothing."""
    return "http://localhost" if url.startswith(UNIX_PREFIX) else url


def make_connector(url: str, limit: int = 100) -> aiohttp.BaseConnector:
    """For a session that talks to this endpoint alone. To be called within a running loop."""
    path = socket_path(url)
    return aiohttp.TCPConnector(limit=limit) if path is None else aiohttp.UnixConnector(path, limit=limit)


def reason(error: Exception) -> str:
    """Why it could not be reached, short: the address stands beside it already."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__

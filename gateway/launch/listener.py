"""The HTTP listening socket. The launcher binds it first and keeps it: a taken port shows before any model loads, port 0 is
never lost again, and clients that connect while a front end is restarted wait in the kernel instead of being refused."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from pathlib import Path

from gateway.config import ServerConfig

BACKLOG = 2048
# A client that stops reading: the kernel would keep up to 4 MB for it and, as long as its machine answers, for ever.
MAX_UNSENT_BYTES = 64 * 1024
READER_TIMEOUT_S = 120


class ListenError(RuntimeError):
    """The endpoint's address cannot be had. One line."""


def listen(config: ServerConfig) -> socket.socket:
    return _listen_unix(config.uds) if config.uds else _listen_tcp(config.host, config.port)


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on --host {host!r}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # connections inherit them
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * READER_TIMEOUT_S)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} on {host} is in use: choose another --port, or 0 for any") from error
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _listen_unix(path: str) -> socket.socket:
    _remove_stale_socket(Path(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"--uds {path} exists and is in use") from error
        raise ListenError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return listener


def _remove_stale_socket(path: Path) -> None:
    """Removes a socket that a killed server has left: one that refuses connections."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # alive, or not ours to judge


def close(listener: socket.socket) -> None:
    """Closes it, and removes a Unix socket's file."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def url(listener: socket.socket, config: ServerConfig) -> str:
    """Where people reach it, with the port that was really bound."""
    if config.uds:
        return f"unix:{config.uds}"
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"

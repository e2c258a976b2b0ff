"""Endpoints as people name them, `http://HOST:PORT` or `unix:PATH` (what `--uds` is shown as), and how aiohttp reaches them."""

from __future__ import annotations

import errno
import os
import ssl

import aiohttp

UNIX_PREFIX = "unix:"
UNKNOWN_ISSUER = range(18, 22)  # X509_V_ERR_…: self-signed, alone or at the end of a chain; no issuer here, or no first one


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


def reason(error: Exception, url: str) -> str:
    """Why the endpoint could not be reached, short: the address stands beside it already."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return _of_certificate(error.certificate_error)
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        cause = error.os_error.reason if isinstance(error.os_error, ssl.SSLError) else error.os_error
        return f"no TLS connection came about ({cause}); perhaps it speaks none: http://"
    number = error.errno if isinstance(error, OSError) else None
    if url.startswith("http://") and (isinstance(error, aiohttp.ServerDisconnectedError) or number == errno.ECONNRESET):
        return "hung up without an answer; perhaps it speaks TLS: https://"
    if number is not None and number > 0:
        return os.strerror(number)
    # A name that is not known: what the resolver's numbers mean, `strerror` does not know.
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _of_certificate(error: Exception) -> str:
    """OpenSSL's numbers are not the system's: its 1, for whatever went wrong, would read `Operation not permitted`."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error}"
    cause = error.verify_message.rstrip(".")
    if error.verify_code in UNKNOWN_ISSUER:
        return f"its certificate is not trusted: {cause}; set SSL_CERT_FILE"
    return f"its certificate is not trusted: {cause}"

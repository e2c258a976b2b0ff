"""Bodies that came compressed. Pure.

aiohttp would do it while it parses: on the event loop, up to the body limit in one call; it takes a cut off gzip stream for a
whole one, and what it understands depends on the packages that happen to be installed.
"""

from __future__ import annotations

import zlib

from gateway.errors import InvalidRequestError

ENCODINGS = ("gzip", "deflate", "identity")


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Raises `InvalidRequestError`: 400 for what is not one whole stream, 413 for what becomes larger than `max_bytes`. Takes
    time, without the GIL."""
    inflater = zlib.decompressobj(_window_bits(encoding, data))
    try:
        body = inflater.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise _invalid(encoding, str(error)) from None
    if len(body) > max_bytes:
        raise body_too_large(max_bytes)
    if not inflater.eof:
        raise _invalid(encoding, "it ends too early")
    if inflater.unused_data:
        raise _invalid(encoding, "there is something behind its end")
    return body


def body_too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")


def _window_bits(encoding: str, data: bytes) -> int:
    """As zlib wants them: they also tell the format. What clients call deflate has zlib's header, as it should, or none."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    return zlib.MAX_WBITS if data[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS


def _invalid(encoding: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is no valid {encoding}: {reason}", "Content-Encoding", code="invalid_body")

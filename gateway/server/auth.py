"""Who may call what: bearer keys, compared without telling how much of one was right."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

# Probes and scrapers have no key. Every other path needs one when keys are set: a new route is closed until opened here.
OPEN_PATHS = frozenset({"/health", "/ready", "/live", "/metrics", "/version"})


class KeyRing:
    """The accepted keys. Without any, everybody is welcome."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that not even the length of a key can be timed.
        self._digests = [_digest(key) for key in keys]

    def admits(self, path: str, authorization: str | None) -> bool:
        """`authorization` is the header's value."""
        if not self._digests or path in OPEN_PATHS:
            return True
        candidate = _digest_of(authorization)
        if candidate is None:
            return False
        # No early exit: the time must not tell which key matched.
        return sum(hmac.compare_digest(candidate, digest) for digest in self._digests) > 0

    def tenant(self, authorization: str | None) -> str | None:
        """A name for whoever holds this key, the same in every front end, and no help to find the key. None without keys."""
        digest = _digest_of(authorization) if self._digests else None
        return None if digest is None else digest.hex()[:16]


def _digest_of(authorization: str | None) -> bytes | None:
    scheme, _, key = (authorization or "").partition(" ")
    return _digest(key.strip()) if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

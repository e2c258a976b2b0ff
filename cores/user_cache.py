"""Where this project keeps what it can make or get again: models that were pulled, compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME`, else `~/.cache`, then `gateway`. Raises `RuntimeError` where nobody has a home directory."""
    cache = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is to be ignored.
    base = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "gateway"

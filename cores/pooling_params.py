"""How a prompt becomes a vector, as far as a request may choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """None everywhere: as the model's makers do it."""

    dimensions: int | None = None  # the vector is cut to so many; only for models that are trained for it
    normalize: bool | None = None  # to the length 1

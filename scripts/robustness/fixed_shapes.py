"""Matrix products of one shape, whatever the batch: what the rows of a product are then is the same in any company.

A measurement's means, not an engine's: it patches the packed layers (bfloat16 on a CPU), which are the only ones that sum in an
order of their own for each number of rows. Attention stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from cores.runner.packed_layers import JoinedLinear, PackedLinear

Product = Callable[..., torch.Tensor]
_PATCHED = ((PackedLinear, "_with_unary"), (PackedLinear, "_with_binary"), (JoinedLinear, "forward"))


def in_tiles(product: Product, num_rows: int) -> Product:
    """The same product, so many rows at a time; the last ones are padded."""

    def tiled(layer: Any, rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        count = len(rows)
        padding = -count % num_rows

        def tiles(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return F.pad(tensor, (0, 0, 0, padding)).split(num_rows)

        num_tiles = (count + padding) // num_rows
        others = [tiles(each) if isinstance(each, torch.Tensor) else [each] * num_tiles for each in rest]
        outputs = [product(layer, tile, *other) for tile, *other in zip(tiles(rows), *others, strict=True)]
        return torch.cat(outputs)[:count]

    return tiled


@contextlib.contextmanager
def products_of(num_rows: int | None) -> Iterator[None]:
    """For engines that are made in here; None: as they are."""
    plain = [(owner, name, getattr(owner, name)) for owner, name in _PATCHED]
    try:
        for owner, name, product in plain:
            if num_rows is not None:
                setattr(owner, name, in_tiles(product, num_rows))
        yield
    finally:
        for owner, name, product in plain:
            setattr(owner, name, product)

"""How far a torch runner is with its weights. Knows transformers, which has a hook for whoever draws its progress bars."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from transformers.utils import logging as transformers_logging

INTERVAL_S = 0.5  # so that 64 ranks that load do not keep a launcher busy


def reported(
    items: Collection[Any], report: Callable[[float], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Any]:
    """The items; `report` is told now and then which part of them has been taken."""
    told_s = clock()
    for index, item in enumerate(items):
        if clock() - told_s >= INTERVAL_S:
            told_s = clock()
            report(index / len(items))
        yield item


@contextlib.contextmanager
def watched_loading(report: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Reports while transformers loads weights inside."""

    def hook(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == "Loading weights" and args and isinstance(args[0], Collection):
            return reported(args[0], report, clock)
        return bar(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)

"""How much of the weights is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from cores.config import EngineConfig
from cores.loader import load_model
from cores.runner.load_progress import reported, watched_loading
from cores.testing import ManualClock


def test_it_is_told_now_and_then_and_nothing_is_lost() -> None:
    clock, told = ManualClock(), []

    def take() -> Iterator[int]:
        for item in reported(range(10), told.append, clock):
            yield item
            clock.sleep(0.3)

    assert list(take()) == list(range(10))
    assert told == [0.2, 0.4, 0.6, 0.8]


def test_a_model_that_loads_says_how_far_it_is(tiny_llama: Path) -> None:
    told: list[float] = []
    looks = itertools.count()
    with watched_loading(told.append, lambda: float(next(looks))):
        load_model(EngineConfig(model=str(tiny_llama), device="cpu"))
    assert told == sorted(told)
    assert len(told) > 3
    assert 0 <= told[0] < told[-1] < 1
    load_model(EngineConfig(model=str(tiny_llama), device="cpu"))
    assert len(told) < next(looks), "nobody is told of what loads outside"

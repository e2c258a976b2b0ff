"""An engine whose steps take 10 ms, 50 µs for a prompt token and 100 µs for a sequence, as its step times tell."""

from __future__ import annotations

import random

import pytest

from cores.step_times import StepTimes


def run(times: StepTimes, steps: list[tuple[int, int]], slowness: float = 1.0, noise: float = 0.0, seed: int = 1) -> StepTimes:
    rng = random.Random(seed)
    for num_prefill_tokens, num_decodes in steps:
        step_s = slowness * (10e-3 + 50e-6 * num_prefill_tokens + 100e-6 * num_decodes)
        times.add(step_s * rng.uniform(1 - noise, 1 + noise), num_prefill_tokens, num_decodes)
    return times


def test_first_step_is_the_average() -> None:
    times = StepTimes()
    assert (times.step_ms, times.prefill_tokens_per_s, times.decode_tokens_per_s) == (0.0, 0.0, 0.0)
    run(times, [(0, 10)])
    assert times.step_ms == pytest.approx(11.0)
    assert times.decode_tokens_per_s == pytest.approx(10 / 11e-3)
    run(times, [(2000, 10)])
    assert times.step_ms == pytest.approx(11 + 0.1 * 100)
    assert times.prefill_tokens_per_s == pytest.approx(20_000)


@pytest.mark.parametrize("num_prompt_tokens", [200, 1000, 8000])
def test_prefill_rate_does_not_depend_on_how_full_steps_are(num_prompt_tokens: int) -> None:
    times = run(StepTimes(), [(num_prompt_tokens, 8), (0, 8), (0, 8)] * 20, noise=0.05)
    assert times.prefill_tokens_per_s == pytest.approx(20_000, rel=0.2)


def test_tiny_prompts_tell_nothing() -> None:
    assert run(StepTimes(), [(5, 8), (0, 8)] * 20, noise=0.05).prefill_tokens_per_s == 0.0


def test_steps_with_prompts_only_tell_nothing_yet() -> None:
    assert run(StepTimes(), [(1000, 0)] * 5).prefill_tokens_per_s == 0.0


def test_engine_that_never_decodes_has_a_rate_by_its_prompts_alone() -> None:
    assert run(StepTimes(decodes=False), [(8000, 0)] * 5).prefill_tokens_per_s == pytest.approx(8000 / 410e-3)
    slow = run(StepTimes(decodes=False), [(8000, 0)] * 5, slowness=3.0)
    assert slow.prefill_tokens_per_s == pytest.approx(8000 / 410e-3 / 3)


def test_one_long_prompt_outweighs_many_tiny_ones() -> None:
    times = run(StepTimes(), [(0, 8), (4000, 8), *[(10, 8)] * 10], noise=0.05)
    assert times.prefill_tokens_per_s == pytest.approx(20_000, rel=0.2)


def test_throttled_engine_shows_within_twenty_prompts() -> None:
    times = run(StepTimes(), [(1000, 8), (0, 8)] * 50)
    run(times, [(1000, 8), (0, 8)] * 20, slowness=3.0)
    assert times.prefill_tokens_per_s == pytest.approx(20_000 / 3, rel=0.2)
    assert times.decode_tokens_per_s == pytest.approx(8 / 10.8e-3 / 3, rel=0.2)

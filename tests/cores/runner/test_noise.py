"""The noise is random enough, and a function of seed, position and token id alone."""

from __future__ import annotations

import math

import pytest
import torch

from cores.runner.noise import draw_key, gumbel_noise, index_hashes

HASHES = index_hashes(4096, torch.device("cpu"))
EULER = 0.5772156649
GOLDEN_KEYS = (16294208416658607535, 16292704262132694875, 11923130667873509210)
GOLDEN_NOISE = (-0.4258602261543274, 0.9060139060020447, -0.8641039133071899, 0.30231788754463196)


def uniforms(keys: list[int]) -> torch.Tensor:
    """The noise on a scale on which it is spread evenly over (0, 1)."""
    return torch.exp(-torch.exp(-gumbel_noise(keys, HASHES).double()))


def chi_square(counts: torch.Tensor) -> float:
    mean = counts.double().mean()
    return float(((counts - mean) ** 2 / mean).sum())


def limit(degrees: int) -> float:
    """Of a chi-square; a good generator passes it once in a million times (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([draw_key(0, position) for position in range(64)], id="positions of one seed"),
        pytest.param([draw_key(seed, 0) for seed in range(64)], id="neighbouring seeds"),
        pytest.param([draw_key(-(2**63) + seed, 3) for seed in range(64)], id="negative seeds"),
    ],
)
def test_noise_is_uniform_over_tokens_and_over_draws(keys: list[int]) -> None:
    u = uniforms(keys)
    assert 0 < u.min() < u.max() < 1
    assert chi_square(torch.histc(u.float(), 256, 0, 1)) < limit(255)
    for column in (0, 1, 2, 1000, 4095):  # one token over many draws
        assert chi_square(torch.histc(u[:, column].float(), 8, 0, 1)) < limit(7)


def test_draws_and_neighbouring_tokens_are_not_correlated() -> None:
    u = uniforms([draw_key(5, position) for position in range(64)]) - 0.5
    bound = 5 / math.sqrt(u.numel())
    for other in (u.roll(1, dims=0), u.roll(1, dims=1), u.roll(64, dims=1), u.roll((1, 1), dims=(0, 1))):
        assert abs(float((u * other).mean() * 12)) < bound
    # Nor is one draw another's numbers in another order. (A float32 has few enough values for 0.6 % to meet by chance.)
    assert len(set(u.flatten().tolist())) > 0.99 * u.numel()


def test_the_gumbel_distribution_has_its_mean_and_variance() -> None:
    noise = gumbel_noise([draw_key(1, p) for p in range(64)], HASHES).double()
    assert float(noise.mean()) == pytest.approx(EULER, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert bool(noise.isfinite().all())


def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_the_vocabulary_size() -> None:
    keys = [draw_key(3, position) for position in range(5)]
    together = gumbel_noise(keys, HASHES)
    for row, key in zip(together, keys, strict=True):
        assert torch.equal(row, gumbel_noise([key], HASHES)[0])
    assert torch.equal(together[:, :100], gumbel_noise(keys, index_hashes(100, torch.device("cpu"))))


def test_noise_never_changes_between_versions() -> None:
    """A request may continue on a rank of another version: these numbers are part of the protocol."""
    assert (draw_key(0, 0), draw_key(7, 3), draw_key(-1, 0)) == GOLDEN_KEYS
    noise = gumbel_noise([draw_key(7, 3)], index_hashes(4, torch.device("cpu")))[0].tolist()
    assert noise == pytest.approx(GOLDEN_NOISE, rel=1e-6)

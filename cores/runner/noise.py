"""Counter-based random numbers: noise is a function of (seed, position, token id) and of nothing else.

No generator has a state that a batch, a restart or another rank could advance differently, so a request draws the same noise
wherever and with whomever it runs. The arithmetic is on integers, which wrap alike on every device.
"""

from __future__ import annotations

import torch

_MASK64 = 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
# Odd multipliers with well spread bits; the tests check what comes out, bit by bit.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B, 0x2C1B3C6D)


def draw_key(seed: int, position: int) -> int:
    """64 bits for one draw. Neighbouring seeds and positions give unrelated keys."""
    return _mix64(_mix64(seed & _MASK64) + (position + 1) * _GOLDEN64 & _MASK64)


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def index_hashes(size: int, device: torch.device) -> torch.Tensor:
    """[size] int32: the part of the hash that only depends on the token id."""
    x = torch.arange(size, dtype=torch.int32, device=device)
    return _scramble(_scramble(x.mul_(_int32(_GOLDEN64)), 16, _MULTIPLIERS[0]), 15, _MULTIPLIERS[1])


def gumbel_noise(keys: list[int], hashes: torch.Tensor) -> torch.Tensor:
    """[len(keys), len(hashes)] float32 of the standard Gumbel distribution: the argmax of log p + noise is a draw from p."""
    low = torch.tensor([_int32(key) for key in keys], dtype=torch.int32, device=hashes.device)
    high = torch.tensor([_int32(key >> 32) for key in keys], dtype=torch.int32, device=hashes.device)
    x = _scramble(hashes ^ low[:, None], 15, _MULTIPLIERS[1])
    # The second half of the key enters between two rounds: entering together, two keys could only permute one set of numbers.
    x = _scramble(x.add_(high[:, None]), 16, _MULTIPLIERS[2])
    # 31 bits as a number in (0, 1). Small ones, which make the large noise that decides, keep all their bits in a float.
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _scramble(x: torch.Tensor, shift: int, multiplier: int) -> torch.Tensor:
    """One round, in place: multiply, then fold the upper bits into the lower ones."""
    x.mul_(_int32(multiplier))
    # `>>` keeps the sign; the mask makes it a shift of unsigned numbers.
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _int32(x: int) -> int:
    """The lower 32 bits as a signed number."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x & 0x80000000 else x

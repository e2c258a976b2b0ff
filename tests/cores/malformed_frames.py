"""Frames that are no message of ours: noise, real ones damaged, real ones with values of any type in any field."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from cores.codec import CodecError, Message, decode, encode

MAX_NOISE_BYTES = 300


def malformed_frames(samples: Sequence[Message], count: int, rng: random.Random) -> Iterator[bytes]:
    """So many; what happens to be a message all the same is left out."""
    while count:
        frame = rng.choice((_noise, _damaged, _mad_field))(rng.choice(samples), rng)
        try:
            decode(frame)
        except CodecError:
            count -= 1
            yield frame


def _noise(_: Message, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, MAX_NOISE_BYTES))


def _damaged(message: Message, rng: random.Random) -> bytes:
    frame = bytearray(encode(message))
    for _ in range(rng.randint(1, 3)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame[: rng.randint(0, len(frame))]) if rng.random() < 0.5 else bytes(frame)


def _mad_field(message: Message, rng: random.Random) -> bytes:
    values = msgpack.unpackb(encode(message), strict_map_key=False)
    values[rng.randrange(len(values))] = _mad_value(rng, 3)
    packed: bytes = msgpack.packb(values)
    return packed


def _mad_value(rng: random.Random, depth: int) -> Any:
    leaves: tuple[Any, ...] = (
        None, True, -1, 0, 2**32, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "x" * 50, b"", b"\0" * 7,
    )  # fmt: skip
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(leaves)
    if rng.random() < 0.5:
        return [_mad_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {rng.randint(0, 9): _mad_value(rng, depth - 1) for _ in range(rng.randint(0, 3))}

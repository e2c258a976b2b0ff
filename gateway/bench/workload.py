"""Which requests are sent and when. Pure: equal seeds give equal workloads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TRACE_BLOCK_TOKENS = 512  # what one entry of a trace's `hash_ids` stands for

# Enough text to find the ids of some hundred ordinary tokens.
SAMPLE_TEXT = """
The river ran past the old mill and under the stone bridge before it reached the town. Every morning the baker opened his
window, looked at the sky and guessed what the day would bring; most days he was wrong, and nobody minded. A letter had come
from the capital: the new road would pass through the valley, with three hundred workers, forty carts and a great deal of
dust. Some people were glad because trade would grow, others feared for their quiet gardens. The teacher asked her class to
write down, in ten sentences, how the village might look after twenty years. Numbers such as 7, 42, 365 and 1984 were on the
board, next to a map of mountains, forests, lakes and small islands. When the bell rang, children ran outside to play football,
chase a yellow dog, climb trees or simply sit in the warm grass and talk about ships, planets and music until evening came.
"""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`at_s` counts from the start of the run; None: as soon as there is room."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    at_s: float | None = None


class WorkloadError(ValueError):
    """A trace that cannot be used. Names the file and line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One line of a trace in Mooncake's format."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()  # equal beginnings stand for equal prompts


def synthetic(
    token_pool: Sequence[int], num_prompts: int, input_len: int, output_len: int, rng: random.Random
) -> list[PlannedRequest]:
    """Prompts of one length that share nothing, so that no prefix cache helps."""
    return [PlannedRequest(tuple(rng.choices(token_pool, k=input_len)), output_len) for _ in range(num_prompts)]


def from_trace(token_pool: Sequence[int], rows: Iterable[TraceRow], rng: random.Random) -> list[PlannedRequest]:
    """Prompts that share prefixes where the trace's did, at the trace's times from its first row on."""
    rows = list(rows)
    start_s = rows[0].timestamp_s if rows else 0.0
    blocks: dict[int, list[int]] = {}
    planned = []
    for row in rows:
        ids: list[int] = []
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = rng.choices(token_pool, k=TRACE_BLOCK_TOKENS)
            ids += blocks[hash_id]
        ids = ids[: row.input_length]
        ids += rng.choices(token_pool, k=row.input_length - len(ids))
        planned.append(PlannedRequest(tuple(ids), row.output_length, row.timestamp_s - start_s))
    return planned


def read_trace(path: Path, num_rows: int | None = None) -> list[TraceRow]:
    """JSON lines with `timestamp` (ms), `input_length`, `output_length` and perhaps `hash_ids`. Raises `WorkloadError`."""
    rows: list[TraceRow] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if num_rows is not None and len(rows) >= num_rows:
                    break
                if line.strip():
                    rows.append(_parse_row(f"{path}, line {number}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise WorkloadError(f"the trace {path} has no rows")
    return rows


def _parse_row(where: str, line: str) -> TraceRow:
    try:
        row = json.loads(line)
        parsed = TraceRow(
            timestamp_s=float(row["timestamp"]) / 1000,
            input_length=int(row["input_length"]),
            output_length=int(row["output_length"]),
            hash_ids=tuple(int(hash_id) for hash_id in row.get("hash_ids", ())),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadError(f"{where}: a row needs timestamp, input_length and output_length as numbers ({error!r})") from None
    if parsed.input_length < 1 or parsed.output_length < 1:
        raise WorkloadError(f"{where}: input_length and output_length must be at least 1")
    return parsed


def with_poisson_arrivals(planned: Sequence[PlannedRequest], rate_per_s: float, rng: random.Random) -> list[PlannedRequest]:
    """The same requests in the same order, independent of each other in time."""
    at_s, timed = 0.0, []
    for request in planned:
        at_s += rng.expovariate(rate_per_s)
        timed.append(replace(request, at_s=at_s))
    return timed


def without_arrivals(planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The same requests for a closed loop."""
    return [replace(request, at_s=None) for request in planned]

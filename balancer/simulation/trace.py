"""Traces of requests: when each came, how long it was, and which prefix blocks it shares. Pure but for reading the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

HASH_ID_TOKENS = 512  # what one entry of a Mooncake trace's `hash_ids` stands for
MIN_BUCKET_SIZE = 2.0  # requests that share a stamp, on average, from which on stamps are taken to be rounded down


class TraceError(ValueError):
    """A trace that cannot be used. Names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float  # from the first request on
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()  # equal beginnings stand for equal prompts, in blocks of `HASH_ID_TOKENS`
    tenant: str | None = None  # whose it is; no trace says so


def load_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """Mooncake's JSON lines, or Azure's CSV. Sorted by arrival, which begins at 0. Raises `TraceError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    rows = _read_jsonl(path, lines) if lines and lines[0].lstrip().startswith("{") else _read_csv(path, lines)
    if not rows:
        raise TraceError(f"the trace {path} has no requests")
    rows.sort(key=lambda row: row.arrival_s)
    start_s = rows[0].arrival_s
    return [replace(row, arrival_s=row.arrival_s - start_s) for row in rows[:max_requests]]


def _read_jsonl(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            hash_ids = tuple(int(hash_id) for hash_id in row.get("hash_ids", ()))
            request = TraceRequest(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), hash_ids)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(
                f"{path}, line {number}: a row needs timestamp (ms), input_length and output_length as numbers ({error!r})"
            ) from None
        rows.append(_checked(path, number, request))
    return rows


def _read_csv(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    rows = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            request = TraceRequest(_stamp_s(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(
                f"{path}, line {number}: neither JSON lines nor CSV with TIMESTAMP, ContextTokens, GeneratedTokens ({error!r})"
            ) from None
        rows.append(_checked(path, number, request))
    return rows


def _stamp_s(text: Any) -> float:
    """Azure writes seven digits behind the point, one more than Python reads."""
    whole, _, fraction = str(text).partition(".")
    digits = "".join(c for c in fraction if c.isdigit())
    return datetime.fromisoformat(whole).timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _checked(path: Path, number: int, request: TraceRequest) -> TraceRequest:
    if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
        raise TraceError(f"{path}, line {number}: a request has at least 1 token of input and 1 of output")
    return request


def spread_buckets(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Spreads requests whose stamps were rounded down to the same value evenly up to the next one.

    A trace in which hardly two requests share a stamp stays as it is.
    """
    stamps = sorted({request.arrival_s for request in trace})
    if len(stamps) < 2 or len(trace) < MIN_BUCKET_SIZE * len(stamps):
        return list(trace)
    width_s = median(later - earlier for earlier, later in pairwise(stamps))
    spread = []
    for stamp_s, group in groupby(trace, key=lambda request: request.arrival_s):
        bucket = list(group)
        spread += [replace(r, arrival_s=stamp_s + width_s * i / len(bucket)) for i, r in enumerate(bucket)]
    return spread


def scale_to_rate(trace: Sequence[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """The same pattern of arrivals, faster or slower, so that its mean rate is `rate_per_s`."""
    span_s = trace[-1].arrival_s
    if span_s == 0.0:
        return list(trace)
    factor = len(trace) / rate_per_s / span_s
    return [replace(request, arrival_s=request.arrival_s * factor) for request in trace]

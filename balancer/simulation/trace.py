"""Traces of requests: when each came, how long it was, and which prefix blocks it shares. Pure but for reading the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby, pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

HASH_ID_TOKENS = 512  # what one entry of a Mooncake trace's `hash_ids` stands for
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
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
    """Mooncake's JSON lines, or Azure's CSV. Sorted by arrival, which begins at 0. Raises `TraceError`.

    A request that got no token counts as one of a single token: its prompt was computed.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
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
        if line.strip():
            try:
                rows.append(_mooncake_request(json.loads(line)))
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
    return rows


def _read_csv(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    reader = csv.DictReader(lines)
    if lines and (missing := [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]):
        raise TraceError(
            f"{path} is neither JSON lines nor CSV with the columns {', '.join(AZURE_COLUMNS)}: its first line has no"
            f" {' and no '.join(missing)}"
        )
    rows = []
    for row in reader:
        try:
            rows.append(_azure_request(row))
        except ValueError as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from None
    return rows


def _mooncake_request(row: Any) -> TraceRequest:
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {_shown(row)}")
    num_prompt_tokens, num_output_tokens = _tokens(row, "input_length", 1), _tokens(row, "output_length", 0)
    timestamp_ms = _number(row, "timestamp")
    if timestamp_ms is None:
        raise ValueError(f"timestamp must be a number of milliseconds, got {_shown(row.get('timestamp'))}")
    hash_ids = row.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(isinstance(hash_id, int) for hash_id in hash_ids):
        raise ValueError(f"hash_ids must be a list of whole numbers, got {_shown(hash_ids)}")
    if len(hash_ids) > num_prompt_tokens // HASH_ID_TOKENS + 1:
        raise ValueError(
            f"hash_ids must have one entry for each {HASH_ID_TOKENS} tokens of the prompt: {len(hash_ids)} are too many for an"
            f" input_length of {num_prompt_tokens}"
        )
    return TraceRequest(timestamp_ms / 1e3, num_prompt_tokens, max(1, num_output_tokens), tuple(hash_ids))


def _azure_request(row: Mapping[str, Any]) -> TraceRequest:
    try:
        stamp = datetime.fromisoformat(row["TIMESTAMP"])
    except (TypeError, ValueError):
        raise ValueError(f"TIMESTAMP must be a date and a time of day, got {_shown(row['TIMESTAMP'])}") from None
    if stamp.tzinfo is None:  # not this machine's time: its clock may be put forward within the trace
        stamp = stamp.replace(tzinfo=UTC)
    return TraceRequest(stamp.timestamp(), _tokens(row, "ContextTokens", 1), max(1, _tokens(row, "GeneratedTokens", 0)))


def _tokens(row: Mapping[str, Any], name: str, least: int) -> int:
    number = _number(row, name)
    if number is None or number < least or not number.is_integer():
        raise ValueError(f"{name} must be a whole number of at least {least}, got {_shown(row.get(name))}")
    return int(number)


def _number(row: Mapping[str, Any], name: str) -> float | None:
    """None if it is not there, or not a finite number."""
    try:
        number = float(row[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) and not isinstance(row[name], bool) else None


def _shown(value: Any) -> str:
    """A field of a row, or what is wrong with it, short enough for one line."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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

"""Which requests a benchmark sends, and when."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.bench.workload import (
    PlannedRequest,
    TraceRow,
    WorkloadError,
    from_trace,
    read_trace,
    synthetic,
    with_poisson_arrivals,
    without_arrivals,
)

POOL = list(range(100, 300))


def write_trace(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_synthetic_prompts_have_the_asked_length_and_differ_from_the_start() -> None:
    planned = synthetic(POOL, 50, 64, 8, random.Random(1))
    assert {len(request.prompt_token_ids) for request in planned} == {64}
    assert {request.num_output_tokens for request in planned} == {8}
    assert len({request.prompt_token_ids[:16] for request in planned}) == 50
    assert {token for request in planned for token in request.prompt_token_ids} <= set(POOL)
    assert planned == synthetic(POOL, 50, 64, 8, random.Random(1))
    assert planned != synthetic(POOL, 50, 64, 8, random.Random(2))


def test_trace_prompts_share_what_their_hash_ids_share() -> None:
    rows = [TraceRow(3.0, 1100, 5, (0, 1, 2)), TraceRow(4.5, 1500, 6, (0, 1, 9)), TraceRow(5.0, 30, 7)]
    first, second, third = from_trace(POOL, rows, random.Random(1))
    assert [len(request.prompt_token_ids) for request in (first, second, third)] == [1100, 1500, 30]
    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024]
    assert first.prompt_token_ids[1024:1100] != second.prompt_token_ids[1024:1100]
    assert [request.at_s for request in (first, second, third)] == [0.0, 1.5, 2.0]
    assert [request.num_output_tokens for request in (first, second, third)] == [5, 6, 7]


def test_poisson_arrivals_have_the_asked_rate_and_only_go_forward() -> None:
    planned = with_poisson_arrivals([PlannedRequest((1,), 1)] * 4000, 20.0, random.Random(3))
    times = [request.at_s for request in planned if request.at_s is not None]
    assert times == sorted(times)
    assert 0.9 < len(times) / times[-1] / 20.0 < 1.1
    assert {request.at_s for request in without_arrivals(planned)} == {None}


def test_a_trace_is_read_as_far_as_asked(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 10, "output_length": 2, "hash_ids": [4]}
    path = write_trace(tmp_path / "t.jsonl", row, "\n", row, "no json at all")
    assert read_trace(path, 2) == [TraceRow(1.5, 10, 2, (4,))] * 2


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("no json\n", "line 1"),
        ({"timestamp": 0, "input_length": 1}, "output_length"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "at least 1"),
        ({"timestamp": "x", "input_length": 1, "output_length": 1}, "numbers"),
        ("", "no rows"),
    ],
)
def test_a_bad_trace_names_its_file_and_line(tmp_path: Path, row: Any, part: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", row)
    with pytest.raises(WorkloadError, match=part) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"cannot read the trace .*none\.jsonl"):
        read_trace(tmp_path / "none.jsonl")

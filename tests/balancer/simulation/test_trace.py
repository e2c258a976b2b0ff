"""Traces are read as their publishers write them, and spread and scaled without changing what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from balancer.simulation.trace import TraceError, TraceRequest, load_trace, scale_to_rate, spread_buckets


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def mooncake(timestamp: int, input_length: int = 600, output_length: int = 5, hash_ids: tuple[int, ...] = (1, 2)) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    )


def test_mooncake_lines_are_read_in_order_of_arrival_from_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(9000, input_length=700), "", mooncake(3000))
    assert load_trace(path) == [TraceRequest(0.0, 600, 5, (1, 2)), TraceRequest(6.0, 700, 5, (1, 2))]


def test_azure_rows_are_read_with_seven_digits_of_a_second(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = load_trace(path)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.hash_ids) == (374, 44, ())
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_only_the_first_requests_are_read_where_asked(tmp_path: Path) -> None:
    assert len(load_trace(write(tmp_path / "t.jsonl", mooncake(0), mooncake(1), mooncake(2)), 2)) == 2


def with_field(name: str, value: object) -> str:
    row = json.loads(mooncake(0))
    return json.dumps({**row, name: value})


CSV_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((mooncake(0), '{"timestamp": 1}'), "line 2: input_length must be a whole number of at least 1, got nothing"),
        ((with_field("output_length", -1),), "line 1: output_length must be a whole number of at least 0, got -1"),
        ((with_field("input_length", -3),), "input_length must be a whole number of at least 1, got -3"),
        ((with_field("input_length", 2.5),), "input_length must be a whole number of at least 1, got 2.5"),
        ((with_field("input_length", True),), "input_length must be a whole number of at least 1, got True"),
        ((with_field("input_length", "x" * 99),), r"input_length must be a whole number of at least 1, got 'x{56}\.\.\."),
        ((with_field("timestamp", "noon"),), "timestamp must be a number of milliseconds, got 'noon'"),
        ((with_field("timestamp", float("nan")),), "timestamp must be a number of milliseconds, got nan"),
        ((with_field("hash_ids", 7),), "hash_ids must be a list of whole numbers, got 7"),
        ((with_field("hash_ids", ["a"]),), r"hash_ids must be a list of whole numbers, got \['a'\]"),
        ((mooncake(0, 600, hash_ids=(1, 2, 3)),), "hash_ids must have one entry for each 512 tokens.* 3 are too many .* 600"),
        ((mooncake(0), "[1, 2]"), r"line 2: a row must be a JSON object, got \[1, 2\]"),
        ((mooncake(0), '{"timestamp": 1,'), "line 2: .*line 1 column"),
        (("TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,3"), "neither JSON lines nor CSV .* no GeneratedTokens"),
        (("[", mooncake(0), "]"), "neither JSON lines nor CSV .* no TIMESTAMP and no ContextTokens"),
        ((CSV_HEAD, "noon,3,4"), "line 2: TIMESTAMP must be a date and a time of day, got 'noon'"),
        ((CSV_HEAD, "2023-11-16 18:15:46,3,4", "2023-11-16 18:15:46,3"), "line 3: GeneratedTokens .* got nothing"),
        ((CSV_HEAD, "2023-11-16 18:15:46,,4"), "line 2: ContextTokens must be a whole number of at least 1, got ''"),
        ((CSV_HEAD,), "has no requests"),
        ((), "has no requests"),
    ],
)
def test_a_bad_trace_is_named_by_file_line_and_field(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(write(tmp_path / "t", *lines))


def test_a_request_that_got_no_token_still_has_its_prompt_computed(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "t", mooncake(0, output_length=0))) == [TraceRequest(0.0, 600, 1, (1, 2))]


def test_stamps_may_name_their_time_zone_and_have_no_fraction(tmp_path: Path) -> None:
    """As later traces of Azure do; some spreadsheets put a mark before the first line, and write 374.0."""
    path = write(
        tmp_path / "t.csv", f"\ufeff{CSV_HEAD}", "2024-05-10 00:00:01.5+00:00,374.0,44", "2024-05-10 02:00:00+02:00,1,1"
    )
    assert load_trace(path) == [TraceRequest(0.0, 1, 1), TraceRequest(1.5, 374, 44)]


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        load_trace(tmp_path / "none")


def test_buckets_are_spread_evenly_up_to_the_next() -> None:
    trace = [TraceRequest(0.0, 1, 1)] * 3 + [TraceRequest(3.0, 2, 1)] * 2 + [TraceRequest(6.0, 3, 1)]
    arrivals = [request.arrival_s for request in spread_buckets(trace)]
    assert arrivals == [0.0, 1.0, 2.0, 3.0, 4.5, 6.0]


def test_a_trace_with_exact_stamps_is_not_spread() -> None:
    trace = [TraceRequest(at_s, 1, 1) for at_s in (0.0, 0.4, 0.4, 5.0)]
    assert spread_buckets(trace) == trace


def test_scaling_keeps_the_pattern_and_meets_the_rate() -> None:
    trace = [TraceRequest(at_s, 1, 1) for at_s in (0.0, 1.0, 4.0)]
    assert [request.arrival_s for request in scale_to_rate(trace, 6.0)] == [0.0, 0.125, 0.5]


def test_a_trace_of_one_moment_cannot_be_scaled_and_stays() -> None:
    trace = [TraceRequest(0.0, 1, 1)] * 2
    assert scale_to_rate(trace, 3.0) == trace

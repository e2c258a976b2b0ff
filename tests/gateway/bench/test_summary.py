"""Figures from results."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.client import EventParser, RequestResult
from gateway.bench.summary import percentile, summarise
from gateway.cli.bench import as_text


def make_result(start_s: float, *chunks_s: float, tokens: int | None = None, error: str | None = None) -> RequestResult:
    end_s = chunks_s[-1] if chunks_s else start_s + 1
    num_tokens = len(chunks_s) if tokens is None else tokens
    return RequestResult(start_s, 10, list(chunks_s), end_s, num_tokens, "0", error)


def test_times_and_rates_are_those_of_the_completed_requests() -> None:
    summary = summarise(
        [make_result(0.0, 0.5, 0.6, 0.8), make_result(1.0, 1.1, 2.0, tokens=4), make_result(1.0, 3.0, error="503: full")]
    )
    assert (summary["requests"], summary["completed"], summary["errors"]) == (3, 2, 1)
    assert summary["error_messages"] == {"503: full": 1}
    assert summary["duration_s"] == 3.0
    assert summary["requests_per_s"] == pytest.approx(2 / 3)
    assert summary["output_tokens_per_s"] == pytest.approx(7 / 3)
    assert summary["tokens_per_chunk"] == pytest.approx(7 / 5)
    assert summary["ttft_ms"]["mean"] == pytest.approx(300)
    assert summary["itl_ms"]["p50"] == pytest.approx(200)
    assert summary["e2e_ms"]["p50"] == pytest.approx(900)
    assert summary["requests_by_rank"] == {"0": 2}


def test_goodput_counts_requests_that_meet_both_levels() -> None:
    results = [
        make_result(0.0, 0.1, 0.2, 0.3),  # 100 ms, then 100 ms a token
        make_result(0.0, 0.9, 1.0),  # late first token
        make_result(0.0, 0.1, 1.0),  # slow later ones
        make_result(0.0, 0.1),  # one token has no later ones
    ]
    assert summarise(results, slo_ttft_ms=500, slo_itl_ms=150)["goodput_requests_per_s"] == pytest.approx(2.0)
    assert summarise(results, slo_ttft_ms=500)["goodput_requests_per_s"] == pytest.approx(3.0)
    assert summarise(results)["goodput_requests_per_s"] is None


def test_nothing_completed_is_a_summary_too() -> None:
    for results in ([], [make_result(0.0, error="refused")], [make_result(0.0)]):
        summary = summarise(results)
        assert summary["completed"] == 0
        assert summary["ttft_ms"] is None
        assert summary["errors"] == len(results)
        assert "0 of" in as_text({"planned": 1, "interrupted": False, **summary})


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    expected = statistics.quantiles(ordered, n=100, method="inclusive")
    for share in (1, 50, 90, 99):
        assert percentile(ordered, share / 100) == pytest.approx(expected[share - 1], abs=1e-6)
    assert percentile([5.0], 0.99) == 5.0


@given(st.data())
def test_events_do_not_depend_on_how_the_network_cuts_them(data: st.DataObject) -> None:
    stream = b": comment\n\n" + b"".join(b'data: {"n": %d}\n\n' % i for i in range(10)) + b"data: [DONE]\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    parser, events = EventParser(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += parser.feed(stream[start:end])
    assert events == [b'{"n": %d}' % i for i in range(10)] + [b"[DONE]"]

"""What is reported follows from what happened, by hand on small cases."""

from __future__ import annotations

import re

import pytest

from balancer.simulation.rank import StepLog
from balancer.simulation.report import as_table, idle_ttft_s, spread, summarise
from balancer.simulation.request import SimulatedRequest
from balancer.simulation.runs import run_policy
from balancer.simulation.simulator import SimulationResult
from balancer.simulation.trace import TraceRequest
from tests.balancer.simulation.workload import COST, chats, make_config

RANK = make_config().rank


def finished(
    first_token_s: float, last_token_s: float, num_prompt_tokens: int = 100, num_output_tokens: int = 11
) -> SimulatedRequest:
    request = SimulatedRequest(0, 0, TraceRequest(1.0, num_prompt_tokens, num_output_tokens), [], 0)
    request.first_token_s, request.last_token_s, request.num_ends = first_token_s, last_token_s, 1
    return request


def test_idle_time_counts_every_chunk() -> None:
    assert idle_ttft_s(RANK, 100) == pytest.approx(COST.step_s(100, 1, 100))
    assert idle_ttft_s(RANK, 10_000) == pytest.approx(COST.step_s(8192, 1, 8192) + COST.step_s(1808, 1, 10_000))


def test_percentiles_interpolate_and_nothing_has_none() -> None:
    assert spread([]) is None
    values = spread([3.0, 1.0, 2.0])
    assert values == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}


def test_queue_delay_is_what_an_idle_rank_would_not_take_and_never_negative() -> None:
    idle_s = idle_ttft_s(RANK, 100)
    requests = [finished(1.0 + idle_s + 0.5, 3.0), finished(1.0 + idle_s / 2, 3.0)]
    summary = summarise("p", SimulationResult(requests, [StepLog()]), RANK, 0.0)
    assert summary["queue_delay_ms"]["p99"] == pytest.approx(495.0)
    assert summary["queue_delay_ms"]["mean"] == pytest.approx(250.0)


def test_gaps_weigh_as_many_tokens_as_they_gave() -> None:
    log = StepLog()
    log.add(0.010, 98)
    log.add(0.500, 1)
    request = finished(1.5, 3.0)
    request.stalls_s.append(2.0)
    itl_ms = summarise("p", SimulationResult([request], [log]), RANK, 0.0)["itl_ms"]
    assert (itl_ms["p50"], itl_ms["p90"], itl_ms["p99"]) == (10.0, 10.0, 500.0)
    assert itl_ms["mean"] == pytest.approx((98 * 10 + 500 + 2000) / 100)


def test_goodput_counts_those_within_both_limits() -> None:
    requests = [finished(1.5, 2.5), finished(1.5, 3.5), finished(2.5, 3.0)]  # 100 and 200 ms a token; late first token
    summary = summarise("p", SimulationResult(requests, [StepLog()]), RANK, 0.0, slo_ttft_ms=1000, slo_itl_ms=150)
    assert summary["goodput_requests_per_s"] == pytest.approx(1 / 2.5)


def test_failed_requests_are_counted_and_have_no_latency() -> None:
    failed = SimulatedRequest(0, 0, TraceRequest(1.0, 10, 1), [], 0)
    failed.on_end(2.0, "no rank came back")
    summary = summarise("p", SimulationResult([failed], [StepLog()]), RANK, 0.0)
    assert (summary["requests"], summary["failed"], summary["ttft_ms"]) == (1, 1, None)
    assert "–" in as_table([summary])


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    logs = [StepLog(), StepLog()]
    logs[0].add(3.0, 0)
    logs[1].add(1.0, 0)
    assert summarise("p", SimulationResult([], logs), RANK, 0.0)["imbalance"] == 1.5


def test_a_real_run_fills_the_whole_table() -> None:
    config, trace = make_config(num_kv_blocks=200), chats(100)
    summary = summarise("least_tokens", run_policy("least_tokens", config, trace, 0), config.rank, 1.0, slo_ttft_ms=5000)
    assert summary["requests"] == 100
    assert summary["failed"] == 0
    assert 0 < summary["prefix_hit_rate"] < 1
    assert summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"] <= summary["e2e_ms"]["p99"]
    _, head, line = as_table([summary]).splitlines()
    assert head.startswith("policy")
    assert line.startswith("least_tokens")


def test_the_table_says_its_units_and_does_not_wrap_in_a_terminal_of_80_columns() -> None:
    times = {"mean": 12_345.6, "p50": 987.6, "p90": 0.0, "p99": 234_567.0}
    row = {
        "policy": "session_affinity", "ttft_ms": times, "queue_delay_ms": times, "itl_ms": times, "prefix_hit_rate": 1.0,
        "imbalance": 1.25, "goodput_requests_per_s": None, "moved": 0, "failed": 0,
    }  # fmt: skip
    titles, names, line = as_table([row]).splitlines()
    assert max(len(titles), len(names), len(line)) <= 80
    assert re.findall(r"\w+, m?s", titles) == ["TTFT, s", "queueing, s", "ITL, ms"]
    cells = ["session_affinity", "12.35", "0.988", "234.6", "0.988", "234.6", "987.6", "234567", "100.0%", "1.250"]
    assert line.split() == cells
    moved, at_level = dict(row, moved=3, failed=1), dict(row, goodput_requests_per_s=1.5)
    assert as_table([moved]).splitlines()[-1] == "session_affinity: 3 requests moved to another rank, 1 failed"
    assert max(map(len, as_table([at_level]).splitlines())) <= 100

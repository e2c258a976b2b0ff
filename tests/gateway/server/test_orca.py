"""Load in response headers, for load balancers in front that weigh endpoints by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cores.testing import ManualClock
from gateway.server.orca import MAX_AGE_S, OrcaReports
from gateway.status import RankStatus, StatusSnapshot, Totals

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Hello?", "max_tokens": 3}


def status(*ranks: RankStatus, num_requests: int = 0) -> StatusSnapshot:
    totals = Totals(requests=num_requests)
    return StatusSnapshot(version="0", mode="", model="m", uptime_s=1.0, state="ready", ranks=ranks, totals=totals)


def rank(number: int, **values: Any) -> RankStatus:
    return RankStatus(**{"rank": number, "epoch": 1, "state": "ready"} | values)


def parsed(header: str) -> dict[str, Any]:
    prefix, _, text = header.partition(" ")
    if prefix == "JSON":
        report: dict[str, Any] = json.loads(text)
        named = report.pop("named_metrics")
        return report | {f"named_metrics.{name}": value for name, value in named.items()}
    assert prefix == "TEXT"
    return {name: float(value) for name, _, value in (pair.partition("=") for pair in text.split(","))}


@pytest.mark.parametrize("load_format", ["text", "json"])
def test_both_formats_say_the_same(load_format: str) -> None:
    reports = OrcaReports(max_num_seqs=8, clock=ManualClock())
    busy = rank(0, waiting=4, running=8, kv_cache_usage=0.25, queued_tokens=700)
    idle = rank(1, running=1, kv_cache_usage=0.5)
    assert parsed(reports.header(load_format, lambda: status(busy, idle))) == {
        "application_utilization": (1.5 + 0.5) / 2,  # one has half a batch more than it can run, the other half a cache
        "rps_fractional": 0.0,
        "named_metrics.num_requests_waiting": 4.0,
        "named_metrics.num_requests_running": 9.0,
        "named_metrics.num_queued_tokens": 700.0,
        "named_metrics.kv_cache_usage_perc": 0.5,
    }


def test_a_dead_rank_is_neither_load_nor_room_and_none_left_is_full() -> None:
    clock = ManualClock()
    reports = OrcaReports(max_num_seqs=8, clock=clock)
    dead = rank(0, state="dead", running=8)
    assert parsed(reports.header("text", lambda: status(dead, rank(1, running=2))))["application_utilization"] == 0.25
    clock.now += MAX_AGE_S
    assert parsed(reports.header("text", lambda: status(dead)))["application_utilization"] == 1.0


def test_requests_per_second_are_counted_over_a_second_at_least() -> None:
    clock = ManualClock()
    reports = OrcaReports(max_num_seqs=8, clock=clock)

    def rate(num_requests: int) -> float:
        header = reports.header("json", lambda: status(rank(0), num_requests=num_requests))
        value: float = parsed(header)["rps_fractional"]
        return value

    clock.now += 0.9
    assert rate(90) == 0.0
    clock.now += 0.6
    assert rate(150) == 100.0
    clock.now += 0.1
    assert rate(1000) == 100.0
    clock.now += 1.9
    assert rate(190) == 20.0


def test_a_thousand_answers_in_a_moment_look_at_the_endpoint_once() -> None:
    clock, looks = ManualClock(), 0
    reports = OrcaReports(max_num_seqs=8, clock=clock)

    def read_status() -> StatusSnapshot:
        nonlocal looks
        looks += 1
        return status(rank(0, running=looks))

    for load_format in ("text", "json") * 500:
        assert parsed(reports.header(load_format, read_status))["named_metrics.num_requests_running"] == 1
    clock.now += MAX_AGE_S
    assert parsed(reports.header("text", read_status))["named_metrics.num_requests_running"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_header_comes_with_answers_to_those_who_ask_for_it(serve: Any, stream: bool) -> None:
    served = await serve()
    headers = {"endpoint-load-metrics-format": "TEXT"}
    async with served.http.post(served.url + COMPLETIONS, json=BODY | {"stream": stream}, headers=headers) as response:
        await response.read()
        assert "application_utilization" in parsed(response.headers["endpoint-load-metrics"])
    async with served.http.post(served.url + COMPLETIONS, json=BODY | {"stream": stream}) as response:
        await response.read()
        assert "endpoint-load-metrics" not in response.headers


async def test_format_that_nobody_knows_is_refused_before_it_costs_a_token(serve: Any) -> None:
    served = await serve()
    headers = {"endpoint-load-metrics-format": "bin"}
    async with served.http.post(served.url + COMPLETIONS, json=BODY, headers=headers) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == "endpoint-load-metrics-format"
    assert "must be one of text, json, got 'bin'" in error["message"]
    assert not served.engine.requests

"""Prometheus text from snapshots and outputs."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Histogram, RequestMetrics, one_two_five
from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.status import FrontEndStatus, LoraStatus, RankStatus, StatusSnapshot, Totals


def samples(metrics: RequestMetrics, snapshot: StatusSnapshot, prefix: str = "gateway:") -> dict[tuple[str, str], float]:
    """By (name, the label that varies)."""
    text = metrics.render(snapshot, prefix).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name, ",".join(labels.values())] = sample.value
    return found


def make_snapshot(**fields: Any) -> StatusSnapshot:
    return StatusSnapshot(**{"version": "1", "mode": "m", "model": "smol", "uptime_s": 1.0, "state": "ready", **fields})


def test_each_rank_has_its_own_series_under_vllms_names() -> None:
    ranks = (
        RankStatus(rank=0, epoch=1, state="ready", running=3, waiting=1, kv_cache_usage=0.5, prompt_tokens=90, preemptions=2),
        RankStatus(rank=1, epoch=4, state="dead", generation_tokens=7, deaths=3, restarts=2, signal_age_ms=40.0, step_ms=8.0),
    )
    found = samples(RequestMetrics(), make_snapshot(ranks=ranks), "vllm:")
    assert found["vllm:num_requests_running", "0"] == 3
    assert found["vllm:num_requests_waiting", "0"] == 1
    assert found["vllm:kv_cache_usage_perc", "0"] == 0.5
    assert found["vllm:prompt_tokens_total", "0"] == 90
    assert found["vllm:num_preemptions_total", "0"] == 2
    assert found["vllm:generation_tokens_total", "1"] == 7
    assert found["vllm:rank_deaths_total", "1"] == 3
    assert found["vllm:rank_restarts_total", "1"] == 2
    assert found["vllm:rank_signal_age_seconds", "1"] == 0.04
    assert found["vllm:rank_step_seconds", "1"] == 0.008
    assert (found["vllm:rank_up", "0"], found["vllm:rank_up", "1"]) == (1, 0)
    assert ("vllm:rank_signal_age_seconds", "0") not in found, "an age that is not known is no sample"


def test_totals_and_front_ends_are_exported() -> None:
    snapshot = make_snapshot(
        totals=Totals(requests=9, aborted=2, failed=1, rejected=4, moved=3, malformed_frames=6),
        front_ends=(FrontEndStatus(index=0, pid=1, in_flight=5, event_loop_lag_ms=1.5),),
    )
    found = samples(RequestMetrics(), snapshot)
    assert found["gateway:requests_received_total", ""] == 9
    assert found["gateway:requests_aborted_total", ""] == 2
    assert found["gateway:requests_failed_total", ""] == 1
    assert found["gateway:admission_rejections_total", ""] == 4
    assert found["gateway:malformed_frames_total", ""] == 6
    assert found["gateway:requests_moved_total", ""] == 3
    assert found["gateway:front_end_requests_in_flight", "0"] == 5
    assert found["gateway:front_end_event_loop_lag_seconds", "0"] == 0.0015


def test_answers_of_all_front_ends_are_one_series_by_status_with_zeros_from_the_start() -> None:
    metrics = RequestMetrics()
    metrics.answers.update({200: 3, 404: 1})
    other = RequestMetrics()
    other.answers.update({200: 2})
    found = samples(metrics.plus([other.to_plain()]), make_snapshot())
    answers = {code: count for (name, code), count in found.items() if name == "gateway:http_answers_total"}
    assert answers == {"200": 5, "400": 0, "404": 1, "499": 0, "500": 0, "503": 0}


def make_finished(**fields: Any) -> FinishedRequest:
    usual: dict[str, Any] = {
        "external_id": "id", "internal_id": "id-1", "finish_reason": "stop", "rank": 0, "arrival_s": 10.0,
        "first_token_s": 10.5, "last_token_s": 11.0, "queued_s": 0.2, "num_sequences": 1, "num_prompt_tokens": 3,
        "num_cached_tokens": 0, "num_generation_tokens": 4, "num_moves": 0,
    }  # fmt: skip
    return FinishedRequest(**(usual | fields))


def test_token_times_are_counted_one_by_one() -> None:
    metrics = RequestMetrics()
    metrics.on_tokens(TokenTimes(1, 3, time_to_first_token_s=[0.5], inter_token_s=[0.09, 0.3]))
    found = samples(metrics, make_snapshot())
    assert found["gateway:time_to_first_token_seconds_sum", "1"] == 0.5
    assert found["gateway:time_to_first_token_seconds_count", "1"] == 1
    assert found["gateway:inter_token_latency_seconds_count", "1"] == 2
    assert found["gateway:inter_token_latency_seconds_bucket", "1,0.1"] == 1
    assert found["gateway:inter_token_latency_seconds_bucket", "1,0.5"] == 2


def test_a_finished_request_fills_the_other_histograms() -> None:
    metrics = RequestMetrics()
    metrics.on_finished(make_finished(finish_reason="length"))
    found = samples(metrics, make_snapshot())
    assert found["gateway:e2e_request_latency_seconds_sum", "0"] == 1.0
    assert found["gateway:request_queue_time_seconds_sum", "0"] == 0.2
    assert found["gateway:request_prompt_tokens_sum", "0"] == 3
    assert found["gateway:request_generation_tokens_sum", "0"] == 4
    assert found["gateway:request_success_total", "0,length"] == 1
    assert found["gateway:request_success_total", "0,stop"] == 0


def test_what_boards_and_autoscalers_made_for_vllm_ask_for_is_there() -> None:
    metrics = RequestMetrics()
    sizes = {"num_sequences": 2, "num_prompt_tokens": 30, "num_cached_tokens": 16, "num_generation_tokens": 9}
    metrics.on_finished(make_finished(**sizes, num_longest_tokens=6, max_tokens=50))
    metrics.on_finished(make_finished(num_longest_tokens=1))
    rank = RankStatus(rank=0, epoch=1, state="ready", num_kv_blocks=640, block_size=16)
    found = samples(metrics, make_snapshot(ranks=(rank, RankStatus(rank=1, epoch=1, state="starting"))), "vllm:")
    assert found["vllm:request_max_num_generation_tokens_sum", "0"] == 7
    assert found["vllm:request_prefill_kv_computed_tokens_sum", "0"] == 17
    assert found["vllm:request_params_n_sum", "0"] == 3
    assert (found["vllm:request_params_max_tokens_sum", "0"], found["vllm:request_params_max_tokens_count", "0"]) == (50, 1)
    assert math.isclose(found["vllm:request_inference_time_seconds_sum", "0"], 2 * 0.8)
    name = "vllm:request_time_per_output_token_seconds"
    assert (found[f"{name}_sum", "0"], found[f"{name}_count", "0"]) == (0.1, 1), "one token has no time after it"
    caches = {labels: value for (name, labels), value in found.items() if name == "vllm:cache_config_info"}
    assert caches == {"16,0,640": 1}, "of block size, rank and number; none of a rank whose cache is not known yet"


def test_an_end_before_any_token_and_rank_is_counted_but_not_timed() -> None:
    metrics = RequestMetrics()
    metrics.on_finished(make_finished(rank=None, finish_reason="abort", first_token_s=None, last_token_s=None))
    found = samples(metrics, make_snapshot())
    assert found["gateway:request_success_total", ",abort"] == 1
    assert found["gateway:e2e_request_latency_seconds_count", ""] == 0


def test_a_rank_that_has_served_nothing_yet_shows_zeros() -> None:
    found = samples(RequestMetrics(), make_snapshot(ranks=(RankStatus(rank=2, epoch=1, state="ready"),)))
    assert found["gateway:request_success_total", "2,stop"] == 0
    assert found["gateway:time_to_first_token_seconds_count", "2"] == 0


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=50))
def test_histogram_buckets_count_every_value_up_to_their_bound(values: list[float]) -> None:
    histogram = Histogram(one_two_five(0.01, 50))
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= float(bound) for value in values)
    assert math.isclose(histogram.sum, math.fsum(values), abs_tol=1e-9)


def test_bounds_are_round_numbers() -> None:
    assert one_two_five(0.001, 0.05) == (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
    assert one_two_five(1, 100) == (1, 2, 5, 10, 20, 50, 100)


def test_two_servers_in_one_process_do_not_mix() -> None:
    one, other = RequestMetrics(), RequestMetrics()
    one.on_finished(make_finished())
    assert ("gateway:request_success_total", "0,stop") not in samples(other, make_snapshot())


def test_adapters_with_requests_are_named_in_labels_as_in_vllm() -> None:
    loras = (LoraStatus("idle"), LoraStatus("a", waiting=1), LoraStatus("b", waiting=2, running=1), LoraStatus("c", running=3))
    text = RequestMetrics().render(make_snapshot(loras=loras, max_loras=4), "vllm:", 1_700_000_000.0).decode()
    (sample,) = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:lora_requests_info"
    ]
    assert sample.labels == {"max_lora": "4", "waiting_lora_adapters": "a,b", "running_lora_adapters": "b,c"}
    assert sample.value == 1_700_000_000.0
    assert "lora_requests_info" not in RequestMetrics().render(make_snapshot(), "vllm:").decode()

"""Load in response headers, as ORCA defines it (Open Request Cost Aggregation, the `OrcaLoadReport` of xDS): a load balancer in
front that asks for it can weigh endpoints by it. Knows the status document."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

from gateway.errors import InvalidRequestError
from gateway.status import RankStatus, StatusSnapshot

FORMAT_HEADER = "endpoint-load-metrics-format"
METRICS_HEADER = "endpoint-load-metrics"
FORMATS = ("text", "json")
# A picture of the endpoint takes a millisecond or more, on the loop that streams answers; ranks report once per step.
MAX_AGE_S = 0.1
MIN_INTERVAL_S = 1.0  # requests per second are counted over at least so long
SERVING_STATES = ("ready", "suspect")


class OrcaReports:
    """Makes the header's value. Keeps what a rate needs between two of them."""

    def __init__(self, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._began_s = clock()
        self._num_requests = 0
        self._requests_per_s = 0.0
        self._read_s = -math.inf
        self._headers: dict[str, str] = {}

    def header(self, format_name: str, read_status: Callable[[], StatusSnapshot]) -> str:
        now = self._clock()
        if now - self._read_s >= MAX_AGE_S:
            self._read_s = now
            self._headers = self._make_headers(read_status(), now)
        return self._headers[format_name]

    def _make_headers(self, status: StatusSnapshot, now: float) -> dict[str, str]:
        """By format."""
        self._update_rate(status.totals.requests, now)
        serving = [rank for rank in status.ranks if rank.state in SERVING_STATES]
        fields = {"application_utilization": self._utilization(serving), "rps_fractional": self._requests_per_s}
        named = {
            "num_requests_waiting": float(sum(rank.waiting for rank in serving)),
            "num_requests_running": float(sum(rank.running for rank in serving)),
            "num_queued_tokens": float(sum(rank.queued_tokens for rank in serving)),
            "kv_cache_usage_perc": max((rank.kv_cache_usage for rank in serving), default=0.0),  # 1 is full, as vLLM has it
        }
        pairs = fields | {f"named_metrics.{name}": value for name, value in named.items()}
        return {
            "text": "TEXT " + ",".join(f"{name}={value:g}" for name, value in pairs.items()),
            "json": "JSON " + json.dumps({**fields, "named_metrics": named}, separators=(",", ":")),
        }

    def _utilization(self, serving: list[RankStatus]) -> float:
        """Mean over the ranks. Above 1 where requests wait; 1, which is full, where none serves."""
        if not serving:
            return 1.0
        shares = [max((rank.waiting + rank.running) / self._max_num_seqs, rank.kv_cache_usage) for rank in serving]
        return sum(shares) / len(shares)

    def _update_rate(self, num_requests: int, now: float) -> None:
        elapsed_s = now - self._began_s
        if elapsed_s >= MIN_INTERVAL_S:
            self._requests_per_s = (num_requests - self._num_requests) / elapsed_s
            self._began_s, self._num_requests = now, num_requests


def known_format(text: str) -> str:
    """Of a request that asks for the header. Raises `InvalidRequestError`."""
    name = text.lower()
    if name not in FORMATS:
        raise InvalidRequestError(f"{FORMAT_HEADER} must be one of {', '.join(FORMATS)}, got {text!r:.80}", FORMAT_HEADER)
    return name

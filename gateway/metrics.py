"""Prometheus text: gauges and counters from a status snapshot, histograms from what requests went through.

Names are vLLM's where vLLM has the thing, behind a configurable prefix. Nothing here is global: two servers in one process
do not mix, and a scrape costs nothing between scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.stat_loggers import StatLogger
from gateway.status import FrontEndStatus, RankStatus, StatusSnapshot, Totals

FINISH_REASONS = ("stop", "length", "abort", "error")
CLIENT_LEFT = 499  # as in nginx's logs: before its answer was complete
USUAL_CODES = (200, 400, CLIENT_LEFT, 500, 503)  # shown from the start: a rate needs a first value
HTTP = "http"  # beside the ranks in `PlainHistograms`
SERVING_STATES = frozenset({"ready", "suspect"})
RANK_STATES = ("starting", "ready", "suspect", "stalled", "draining", "paused", "sleeping", "dead", "restarting")


def one_two_five(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5, 10 … times `low` up to `high`."""
    bounds, decade = [], low
    while decade <= high:
        bounds += [decade * step for step in (1, 2, 5) if decade * step <= high * (1 + 1e-9)]
        decade *= 10
    return tuple(float(f"{bound:.6g}") for bound in bounds)


class Histogram:
    """Counts by upper bound. 0.2 µs an observation, without prometheus_client's locks and label look-ups."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is above every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


PlainHistograms = dict[str, dict[str, list[float]]]  # by rank ("" for none), by name: the counts, and the sum behind them


class RankHistograms:
    """What the requests went through whose first rank this was."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(one_two_five(0.001, 500))
        self.inter_token_latency = Histogram(one_two_five(0.001, 50))
        self.e2e_latency = Histogram(one_two_five(0.01, 5000))
        self.queue_time = Histogram(one_two_five(0.001, 500))
        self.prefill_time = Histogram(one_two_five(0.001, 500))
        self.decode_time = Histogram(one_two_five(0.01, 5000))
        self.inference_time = Histogram(one_two_five(0.01, 5000))
        self.time_per_output_token = Histogram(one_two_five(0.001, 50))
        self.prompt_tokens = Histogram(one_two_five(1, 1_000_000))
        self.computed_tokens = Histogram(one_two_five(1, 1_000_000))
        self.generation_tokens = Histogram(one_two_five(1, 1_000_000))
        self.longest_tokens = Histogram(one_two_five(1, 1_000_000))
        self.max_tokens = Histogram(one_two_five(1, 1_000_000))
        self.num_sequences = Histogram(one_two_five(1, 100))
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))

    def to_plain(self) -> dict[str, list[float]]:
        plain = {name: [*getattr(self, name).counts, getattr(self, name).sum] for _, _, name in _HISTOGRAM_ROWS}
        return plain | {"finished": [float(self.finished[reason]) for reason in FINISH_REASONS]}

    def add_plain(self, plain: dict[str, list[float]]) -> None:
        for _, _, name in _HISTOGRAM_ROWS:
            histogram: Histogram = getattr(self, name)
            *counts, total = plain[name]
            histogram.counts = [a + int(b) for a, b in zip(histogram.counts, counts, strict=True)]
            histogram.sum += total
        self.finished.update({reason: int(n) for reason, n in zip(FINISH_REASONS, plain["finished"], strict=True)})


class RequestMetrics(StatLogger):
    """What the requests of one server went through, as its output processor tells."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.by_rank: defaultdict[int | None, RankHistograms] = defaultdict(RankHistograms)  # None: no rank had it
        self.answers: Counter[int] = Counter()  # of inference requests, by HTTP status

    def on_tokens(self, times: TokenTimes) -> None:
        """Called once per slice of outputs; all that is done per token is here."""
        histograms = self.by_rank[times.rank]
        for seconds in times.time_to_first_token_s:
            histograms.time_to_first_token.observe(seconds)
        observe = histograms.inter_token_latency.observe
        for seconds in times.inter_token_s:
            observe(seconds)

    def on_finished(self, request: FinishedRequest) -> None:
        """Called once per request, however it ended."""
        histograms = self.by_rank[request.rank]
        histograms.finished[request.finish_reason] += 1
        if request.first_token_s is None or request.last_token_s is None:
            return
        histograms.queue_time.observe(request.queued_s)
        histograms.prefill_time.observe(max(0.0, request.first_token_s - request.arrival_s - request.queued_s))
        histograms.decode_time.observe(request.last_token_s - request.first_token_s)
        histograms.e2e_latency.observe(request.last_token_s - request.arrival_s)
        histograms.inference_time.observe(max(0.0, request.last_token_s - request.arrival_s - request.queued_s))
        if request.num_longest_tokens > 1:
            seconds = (request.last_token_s - request.first_token_s) / (request.num_longest_tokens - 1)
            histograms.time_per_output_token.observe(seconds)
        histograms.prompt_tokens.observe(request.num_prompt_tokens)
        histograms.computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)
        histograms.generation_tokens.observe(request.num_generation_tokens)
        histograms.longest_tokens.observe(request.num_longest_tokens)
        histograms.num_sequences.observe(request.num_sequences)
        if request.max_tokens is not None:
            histograms.max_tokens.observe(request.max_tokens)

    def to_plain(self) -> PlainHistograms:
        """For another process to add to its own."""
        plain = {"" if rank is None else str(rank): histograms.to_plain() for rank, histograms in self.by_rank.items()}
        return plain | {HTTP: {str(code): [float(count)] for code, count in self.answers.items()}}

    def plus(self, plains: Iterable[PlainHistograms]) -> RequestMetrics:
        """These and what other processes have counted."""
        total = RequestMetrics()
        for plain in (self.to_plain(), *plains):
            for rank, by_name in plain.items():
                if rank == HTTP:
                    total.answers.update({int(code): int(count) for code, (count,) in by_name.items()})
                    continue
                total.by_rank[int(rank) if rank else None].add_plain(by_name)
        return total

    def render(self, snapshot: StatusSnapshot, prefix: str, now: float = 0.0) -> bytes:
        """The text of one scrape. `now` is Unix time, for what is said in that."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(self, snapshot, prefix, now))
        if len(snapshot.front_ends) <= 1:  # of several processes, each scrape would show another one's
            ProcessCollector(registry=registry)
        return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class _Row:
    """One metric that has a sample for each rank or front end."""

    name: str
    help: str
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    value: Callable[..., float | None]  # None: no sample


_RANK_ROWS = (
    _Row("num_requests_running", "Requests running in the rank.", GaugeMetricFamily, lambda r: r.running),
    _Row("num_requests_waiting", "Requests waiting in the rank.", GaugeMetricFamily, lambda r: r.waiting),
    _Row("kv_cache_usage_perc", "KV cache in use; 1 is all of it.", GaugeMetricFamily, lambda r: r.kv_cache_usage),
    _Row("prompt_tokens", "Prompt tokens processed.", CounterMetricFamily, lambda r: r.prompt_tokens),
    _Row("generation_tokens", "Tokens generated.", CounterMetricFamily, lambda r: r.generation_tokens),
    _Row("prefix_cache_queries", "Prompt tokens looked up.", CounterMetricFamily, lambda r: r.prefix_cache_queries),
    _Row("prefix_cache_hits", "Prompt tokens found in the prefix cache.", CounterMetricFamily, lambda r: r.prefix_cache_hits),
    _Row("num_preemptions", "Sequences preempted.", CounterMetricFamily, lambda r: r.preemptions),
    _Row("rank_up", "1 while the rank takes requests.", GaugeMetricFamily, lambda r: r.state in SERVING_STATES),
    _Row("rank_queued_tokens", "Prompt tokens still to be computed.", GaugeMetricFamily, lambda r: r.queued_tokens),
    _Row("rank_ledger_tokens", "Tokens booked on the rank here.", GaugeMetricFamily, lambda r: r.ledger_tokens),
    _Row("rank_ledger_requests", "Sequences booked on the rank here.", GaugeMetricFamily, lambda r: r.ledger_requests),
    _Row(
        "rank_ledger_difference_requests", "Sequences booked here and not in the rank's report.", GaugeMetricFamily,
        lambda r: r.ledger_requests - r.running - r.waiting,
    ),
    _Row("rank_step_seconds", "Time of one engine step (EWMA).", GaugeMetricFamily, lambda r: r.step_ms / 1e3),
    _Row("rank_last_seen_seconds", "Since the rank's last sign of life.", GaugeMetricFamily, lambda r: r.last_seen_s),
    _Row(
        "rank_signal_age_seconds", "Since the rank's load was as last reported.", GaugeMetricFamily,
        lambda r: None if r.signal_age_ms is None else r.signal_age_ms / 1e3,
    ),
    _Row("rank_requests", "Requests sent to the rank.", CounterMetricFamily, lambda r: r.requests_total),
    _Row("rank_requests_moved_away", "Requests taken over by others.", CounterMetricFamily, lambda r: r.requests_moved_away),
    _Row("rank_requests_moved_in", "Requests taken over from others.", CounterMetricFamily, lambda r: r.requests_moved_in),
    _Row("rank_deaths", "Deaths of the rank.", CounterMetricFamily, lambda r: r.deaths),
    _Row("rank_stalls", "Times the rank had work and made no step.", CounterMetricFamily, lambda r: r.stalls),
    _Row("rank_restarts", "Restarts of the rank.", CounterMetricFamily, lambda r: r.restarts),
)  # fmt: skip

_FRONT_END_ROWS = (
    _Row("front_end_requests_in_flight", "Requests accepted and not ended.", GaugeMetricFamily, lambda f: f.in_flight),
    _Row("front_end_requests_queued", "Requests not yet sent to a rank.", GaugeMetricFamily, lambda f: f.queued),
    _Row("front_end_last_seen_seconds", "Since its last word to the others.", GaugeMetricFamily, lambda f: f.age_s),
    _Row(
        "front_end_event_loop_lag_seconds", "How late the event loop is.", GaugeMetricFamily,
        lambda f: f.event_loop_lag_ms / 1e3,
    ),
)  # fmt: skip

_TOTAL_ROWS = (
    _Row("requests_received", "Requests accepted.", CounterMetricFamily, lambda t: t.requests),
    _Row("requests_aborted", "Requests aborted.", CounterMetricFamily, lambda t: t.aborted),
    _Row("requests_failed", "Requests ended by an error.", CounterMetricFamily, lambda t: t.failed),
    _Row("requests_moved", "Moves of requests to another rank.", CounterMetricFamily, lambda t: t.moved),
    _Row("requests_expired", "Requests without a token by their deadlines.", CounterMetricFamily, lambda t: t.expired),
    _Row("admission_rejections", "Requests refused for want of room.", CounterMetricFamily, lambda t: t.rejected),
    _Row("malformed_frames", "Messages of ranks that could not be read.", CounterMetricFamily, lambda t: t.malformed_frames),
)

_HISTOGRAM_ROWS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token"),
    ("inter_token_latency_seconds", "Between two tokens of a sequence.", "inter_token_latency"),
    ("e2e_request_latency_seconds", "From arrival to the last token.", "e2e_latency"),
    ("request_queue_time_seconds", "Waiting in the engine before the first step.", "queue_time"),
    ("request_prefill_time_seconds", "From the first step to the first token.", "prefill_time"),
    ("request_decode_time_seconds", "From the first token to the last.", "decode_time"),
    ("request_inference_time_seconds", "From the first step to the last token.", "inference_time"),
    ("request_time_per_output_token_seconds", "Mean of a request, after its first token.", "time_per_output_token"),
    ("request_prompt_tokens", "Prompt tokens per request.", "prompt_tokens"),
    ("request_prefill_kv_computed_tokens", "Of these, not found in the prefix cache.", "computed_tokens"),
    ("request_generation_tokens", "Generated tokens per request.", "generation_tokens"),
    ("request_max_num_generation_tokens", "Generated tokens of a request's longest sequence.", "longest_tokens"),
    ("request_params_max_tokens", "What requests had as max_tokens.", "max_tokens"),
    ("request_params_n", "What requests had as n.", "num_sequences"),
)


class _Scrape(Collector):
    """All metrics of one moment."""

    def __init__(self, requests: RequestMetrics, snapshot: StatusSnapshot, prefix: str, now: float) -> None:
        self._now = now
        self._requests = requests
        self._snapshot = snapshot
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield from self._rows(_RANK_ROWS, "engine", [(str(rank.rank), rank) for rank in snapshot.ranks])
        yield self._rank_states()
        yield self._cache_config()
        yield from self._rows(_FRONT_END_ROWS, "front_end", [(str(f.index), f) for f in snapshot.front_ends])
        yield from self._rows(_TOTAL_ROWS, None, [("", snapshot.totals)])
        yield self._answers()
        if snapshot.max_loras:
            yield self._loras()
        yield from self._histograms()
        success = CounterMetricFamily(
            f"{self._prefix}request_success", "Requests ended, by reason.", labels=["engine", "model_name", "finished_reason"]
        )
        for engine, histograms in self._by_engine():
            for reason, count in histograms.finished.items():
                success.add_metric([engine, snapshot.model, reason], count)
        yield success

    def _rank_states(self) -> Metric:
        states = GaugeMetricFamily(
            f"{self._prefix}rank_state", "1 for the state that the rank is in.", labels=["engine", "model_name", "state"]
        )
        for rank in self._snapshot.ranks:
            for state in RANK_STATES:
                states.add_metric([str(rank.rank), self._snapshot.model, state], float(rank.state == state))
        return states

    def _cache_config(self) -> Metric:
        """vLLM's: how large a KV cache is. Autoscalers read it."""
        info = GaugeMetricFamily(
            f"{self._prefix}cache_config_info", "Size of the KV cache.",
            labels=["engine", "model_name", "block_size", "num_gpu_blocks"],
        )  # fmt: skip
        for rank in self._snapshot.ranks:
            if rank.num_kv_blocks:
                info.add_metric([str(rank.rank), self._snapshot.model, str(rank.block_size), str(rank.num_kv_blocks)], 1.0)
        return info

    def _answers(self) -> Metric:
        """What clients saw: also requests that failed before an engine heard of them, and those whose client left."""
        family = CounterMetricFamily(
            f"{self._prefix}http_answers", "Inference requests over HTTP, by status.", labels=["model_name", "code"]
        )
        answers = dict.fromkeys(USUAL_CODES, 0) | self._requests.answers
        for code, count in sorted(answers.items()):
            family.add_metric([self._snapshot.model, str(code)], count)
        return family

    def _loras(self) -> Metric:
        """vLLM's: names in labels, and the time as value. Routers that look for an adapter read it."""
        info = GaugeMetricFamily(
            f"{self._prefix}lora_requests_info",
            "LoRA adapters that requests run with and wait for.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        loras = self._snapshot.loras
        waiting, running = (",".join(lora.name for lora in loras if getattr(lora, s)) for s in ("waiting", "running"))
        info.add_metric([str(self._snapshot.max_loras), waiting, running], self._now)
        return info

    def _by_engine(self) -> list[tuple[str, RankHistograms]]:
        """Ranks that have served nothing yet have their zeros too: a rate needs a first value."""
        ranks = {rank.rank for rank in self._snapshot.ranks} | self._requests.by_rank.keys()
        engines = sorted(ranks, key=lambda rank: -1 if rank is None else rank)
        return [("" if rank is None else str(rank), self._requests.by_rank[rank]) for rank in engines]

    def _rows(
        self, rows: Iterable[_Row], label: str | None, subjects: list[tuple[str, RankStatus | FrontEndStatus | Totals]]
    ) -> Iterator[Metric]:
        labels = ["model_name"] if label is None else [label, "model_name"]
        for row in rows:
            family = row.kind(self._prefix + row.name, row.help, labels=labels)
            for subject_label, subject in subjects:
                value = row.value(subject)
                if value is not None:
                    values = [self._snapshot.model] if label is None else [subject_label, self._snapshot.model]
                    family.add_metric(values, float(value))
            yield family

    def _histograms(self) -> Iterator[Metric]:
        for name, help_text, attribute in _HISTOGRAM_ROWS:
            family = HistogramMetricFamily(self._prefix + name, help_text, labels=["engine", "model_name"])
            for engine, histograms in self._by_engine():
                histogram: Histogram = getattr(histograms, attribute)
                family.add_metric([engine, self._snapshot.model], buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family

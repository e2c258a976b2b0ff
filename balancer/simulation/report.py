"""From what happened in a simulation to what people compare. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from balancer.simulation.rank import RankConfig
from balancer.simulation.request import SimulatedRequest
from balancer.simulation.simulator import SimulationResult

Spread = dict[str, float]
SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def idle_ttft_s(config: RankConfig, num_prompt_tokens: int) -> float:
    """What a prompt takes on a rank that has nothing else to do and nothing of it in its cache."""
    seconds, num_computed = 0.0, 0
    while num_computed < num_prompt_tokens:
        num_tokens = min(config.max_num_batched_tokens, num_prompt_tokens - num_computed)
        num_computed += num_tokens
        seconds += config.cost.step_s(num_tokens, 1, num_computed)
    return seconds


def summarise(
    policy: str,
    result: SimulationResult,
    config: RankConfig,
    wall_s: float,
    *,
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
    counts: Callable[[SimulatedRequest], bool] = lambda request: True,
) -> dict[str, Any]:
    """One JSON-able object, over the requests that `counts`. Latencies are those of requests that came to their end."""
    requests = [request for request in result.requests if counts(request)]
    done = [request for request in requests if request.error is None]
    ttft_ms = [1e3 * request.ttft_s for request in done]
    idle_ms = [1e3 * idle_ttft_s(config, request.trace.num_prompt_tokens) for request in done]
    num_good = sum(_meets(request, slo_ttft_ms, slo_itl_ms) for request in done)
    span_s = max((r.last_token_s or 0.0 for r in done), default=0.0) - min((r.arrival_s for r in done), default=0.0)
    busy_s = [log.busy_s for log in result.logs]
    num_queried = sum(request.trace.num_prompt_tokens for request in done)
    return {
        "policy": policy,
        "requests": len(requests),
        "failed": len(requests) - len(done),
        "moved": sum(request.num_moves > 0 for request in requests),
        "ttft_ms": spread(ttft_ms),
        "queue_delay_ms": spread([max(0.0, ttft - idle) for ttft, idle in zip(ttft_ms, idle_ms, strict=True)]),
        "itl_ms": _itl_ms(result),
        "e2e_ms": spread([1e3 * ((request.last_token_s or 0.0) - request.arrival_s) for request in done]),
        "goodput_requests_per_s": num_good / span_s if span_s > 0 and (slo_ttft_ms or slo_itl_ms) else None,
        "prefix_hit_rate": sum(request.num_cached_tokens for request in done) / max(1, num_queried),
        # The busiest rank's time in steps over the mean rank's.
        "imbalance": max(busy_s) * len(busy_s) / sum(busy_s) if sum(busy_s) else 1.0,
        "wall_s": wall_s,
    }


def _meets(request: SimulatedRequest, slo_ttft_ms: float | None, slo_itl_ms: float | None) -> bool:
    """Time to first token, and mean time per later token."""
    if slo_ttft_ms is not None and 1e3 * request.ttft_s > slo_ttft_ms:
        return False
    num_later = request.trace.num_output_tokens - 1
    if slo_itl_ms is None or num_later == 0:
        return True
    assert request.first_token_s is not None
    assert request.last_token_s is not None
    return 1e3 * (request.last_token_s - request.first_token_s) / num_later <= slo_itl_ms


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and percentiles, with linear interpolation between neighbours. None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {"mean": sum(ordered) / len(ordered)} | {name: _percentile(ordered, share) for name, share in SHARES.items()}


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _itl_ms(result: SimulationResult) -> Spread | None:
    """Over all gaps between two tokens: every step is a gap for each of its decodes."""
    gaps = [pair for log in result.logs for pair in zip(log.decode_s, log.num_decodes, strict=True)]
    gaps += [(stall_s, 1) for request in result.requests for stall_s in request.stalls_s]
    if not gaps:
        return None
    gaps.sort()
    total = sum(number for _, number in gaps)
    itl_ms = {"mean": 1e3 * sum(gap_s * number for gap_s, number in gaps) / total}
    num_seen, wanted = 0, list(SHARES.items())
    for gap_s, number in gaps:
        num_seen += number
        while wanted and num_seen >= wanted[0][1] * total:
            itl_ms[wanted.pop(0)[0]] = 1e3 * gap_s
    return itl_ms


_COLUMNS = (  # title with its unit, key, what is shown of it, what a millisecond is in that unit
    ("TTFT, s", "ttft_ms", ("mean", "p50", "p99"), 1e-3),
    ("queueing, s", "queue_delay_ms", ("p50", "p99"), 1e-3),
    ("ITL, ms", "itl_ms", ("p50", "p99"), 1.0),
)
_CELL = 7


def as_table(summaries: Sequence[dict[str, Any]]) -> str:
    """For people, and a terminal of 80 columns: one line for each policy, and one more where requests were moved or failed."""
    has_goodput = any(summary["goodput_requests_per_s"] is not None for summary in summaries)
    width = max([len("policy"), *(len(summary["policy"]) for summary in summaries)])
    titles = " " * width + "".join(f" {f' {title} ':-^{_CELL * len(names) - 1}}" for title, _, names, _ in _COLUMNS)
    names = "".join(f"{name:>{_CELL}}" for _, _, names, _ in _COLUMNS for name in names)
    lines = [f"{titles}  prefix       {'    good' * has_goodput}".rstrip()]
    lines.append(f"{'policy':<{width}}{names}{'hits':>8}{'imbal.':>7}" + "   req/s" * has_goodput)
    for summary in summaries:
        cells = [_cell(summary[key], name, scale) for _, key, names, scale in _COLUMNS for name in names]
        line = f"{summary['policy']:<{width}}" + "".join(f" {cell:>{_CELL - 1}}" for cell in cells)
        line += f"{summary['prefix_hit_rate']:>8.1%}{summary['imbalance']:>7.3f}"
        lines.append(line + (f"{summary['goodput_requests_per_s'] or 0.0:>8.2f}" if has_goodput else ""))
    lines += [
        f"{summary['policy']}: {summary['moved']} requests moved to another rank, {summary['failed']} failed"
        for summary in summaries
        if summary["moved"] or summary["failed"]
    ]
    return "\n".join(lines)


def _cell(values: Spread | None, name: str, scale: float) -> str:
    """Four digits or so: six columns at most."""
    if values is None:
        return "–"
    value = scale * values[name]
    decimals = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{decimals}f}"

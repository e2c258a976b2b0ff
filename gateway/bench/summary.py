"""From what requests went through to what people compare. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gateway.bench.client import RequestResult

MAX_ERROR_MESSAGES = 5


def summarise(
    results: Sequence[RequestResult], *, slo_ttft_ms: float | None = None, slo_itl_ms: float | None = None
) -> dict[str, Any]:
    """One JSON-able object. Times of failed requests do not count; goodput is None without a service level to meet."""
    good = [result for result in results if result.error is None and result.chunk_times_s]
    errors = Counter(result.error or "no tokens came" for result in results if result.error or not result.chunk_times_s)
    duration_s = _duration_s(results)
    num_output_tokens = sum(result.num_output_tokens for result in good)
    num_chunks = sum(len(result.chunk_times_s) for result in good)
    has_slo = slo_ttft_ms is not None or slo_itl_ms is not None
    num_in_slo = sum(_meets(result, slo_ttft_ms, slo_itl_ms) for result in good)
    return {
        "requests": len(results),
        "completed": len(good),
        "errors": sum(errors.values()),
        "error_messages": dict(errors.most_common(MAX_ERROR_MESSAGES)),
        "duration_s": duration_s,
        "requests_per_s": _per_s(len(good), duration_s),
        "prompt_tokens": sum(result.num_prompt_tokens for result in good),
        "output_tokens": num_output_tokens,
        "output_tokens_per_s": _per_s(num_output_tokens, duration_s),
        "tokens_per_chunk": num_output_tokens / num_chunks if num_chunks else None,
        "goodput_requests_per_s": _per_s(num_in_slo, duration_s) if has_slo else None,
        "ttft_ms": _spread([_ttft_ms(result) for result in good]),
        "itl_ms": _spread([gap for result in good for gap in _gaps_ms(result)]),
        "e2e_ms": _spread([1000 * (result.chunk_times_s[-1] - result.start_s) for result in good]),
        "requests_by_rank": dict(sorted(Counter(r.rank for r in good if r.rank is not None).items())),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, with linear interpolation between neighbours."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": percentile(ordered, 0.50),
        "p90": percentile(ordered, 0.90),
        "p99": percentile(ordered, 0.99),
    }


def _duration_s(results: Sequence[RequestResult]) -> float:
    """From the first request's start to the last one's end."""
    ends = [result.end_s for result in results if result.end_s is not None]
    return max(ends) - min(result.start_s for result in results) if ends else 0.0


def _per_s(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _ttft_ms(result: RequestResult) -> float:
    return 1000 * (result.chunk_times_s[0] - result.start_s)


def _gaps_ms(result: RequestResult) -> list[float]:
    """Between chunks: what a reader sees, also when a chunk holds several tokens."""
    return [1000 * (later - earlier) for earlier, later in pairwise(result.chunk_times_s)]


def _meets(result: RequestResult, slo_ttft_ms: float | None, slo_itl_ms: float | None) -> bool:
    """Time to first token, and mean time per later token."""
    if slo_ttft_ms is not None and _ttft_ms(result) > slo_ttft_ms:
        return False
    if slo_itl_ms is None or result.num_output_tokens < 2:
        return True
    span_ms = 1000 * (result.chunk_times_s[-1] - result.chunk_times_s[0])
    return span_ms / (result.num_output_tokens - 1) <= slo_itl_ms

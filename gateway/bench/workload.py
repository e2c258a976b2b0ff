"""Which requests are sent and when. Pure: equal seeds give equal workloads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from balancer.simulation.trace import HASH_ID_TOKENS, TraceRequest

# Enough text to find the ids of some hundred ordinary tokens.
SAMPLE_TEXT = """
The river ran past the old mill and under the stone bridge before it reached the town. Every morning the baker opened his
window, looked at the sky and guessed what the day would bring; most days he was wrong, and nobody minded. A letter had come
from the capital: the new road would pass through the valley, with three hundred workers, forty carts and a great deal of
dust. Some people were glad because trade would grow, others feared for their quiet gardens. The teacher asked her class to
write down, in ten sentences, how the village might look after twenty years. Numbers such as 7, 42, 365 and 1984 were on the
board, next to a map of mountains, forests, lakes and small islands. When the bell rang, children ran outside to play football,
chase a yellow dog, climb trees or simply sit in the warm grass and talk about ships, planets and music until evening came.
"""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`at_s` counts from the start of the run; None: as soon as there is room."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    at_s: float | None = None


class WorkloadError(ValueError):
    """Arguments that say no workload."""


def synthetic(
    token_pool: Sequence[int], num_prompts: int, input_len: int, output_len: int, rng: random.Random
) -> list[PlannedRequest]:
    """Prompts of one length that share nothing, so that no prefix cache helps."""
    return [PlannedRequest(tuple(rng.choices(token_pool, k=input_len)), output_len) for _ in range(num_prompts)]


def from_trace(token_pool: Sequence[int], trace: Iterable[TraceRequest], rng: random.Random) -> list[PlannedRequest]:
    """Prompts that share prefixes where the trace's did, at the trace's times."""
    blocks: dict[int, list[int]] = {}
    planned = []
    for row in trace:
        ids: list[int] = []
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = rng.choices(token_pool, k=HASH_ID_TOKENS)
            ids += blocks[hash_id]
        ids = ids[: row.num_prompt_tokens]
        ids += rng.choices(token_pool, k=row.num_prompt_tokens - len(ids))
        planned.append(PlannedRequest(tuple(ids), row.num_output_tokens, row.arrival_s))
    return planned


def with_poisson_arrivals(planned: Sequence[PlannedRequest], rate_per_s: float, rng: random.Random) -> list[PlannedRequest]:
    """The same requests in the same order, independent of each other in time."""
    at_s, timed = 0.0, []
    for request in planned:
        at_s += rng.expovariate(rate_per_s)
        timed.append(replace(request, at_s=at_s))
    return timed


def without_arrivals(planned: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The same requests for a closed loop."""
    return [replace(request, at_s=None) for request in planned]

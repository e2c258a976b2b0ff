"""Small synthetic traces, and the configuration that the tests of the simulation share."""

from __future__ import annotations

import random
from typing import Any

from balancer.simulation.rank import RankConfig
from balancer.simulation.simulator import SimulationConfig
from balancer.simulation.trace import TraceRequest
from cores.config import SimulatedConfig

COST = SimulatedConfig(step_ms=8, prefill_us=50, seq_us=50, ctx_ns=30)


def chats(num_requests: int, *, seed: int = 0, rate_per_s: float = 6.0, num_users: int = 12) -> list[TraceRequest]:
    """Users who send longer and longer prompts, each beginning with the one before, and some who say one thing."""
    rng = random.Random(seed)
    histories: list[list[int]] = [[user] for user in range(num_users)]
    trace, now, next_id = [], 0.0, num_users
    for _ in range(num_requests):
        now += rng.expovariate(rate_per_s)
        next_id += 1
        history = rng.choice(histories) if rng.random() < 0.8 else [next_id]
        if len(history) > 12:
            del history[1:]
        for _ in range(rng.randint(1, 3)):
            next_id += 1
            history.append(next_id)
        num_prompt_tokens = 512 * len(history) - rng.randrange(512)
        trace.append(TraceRequest(now, num_prompt_tokens, rng.randint(1, 120), tuple(history)))
    return trace


def make_config(
    num_ranks: int = 3, *, fast_forward: bool = True, num_kv_blocks: int = 64, block_size: int = 512, **fields: Any
) -> SimulationConfig:
    rank = RankConfig(cost=COST, num_kv_blocks=num_kv_blocks, block_size=block_size, fast_forward=fast_forward)
    return SimulationConfig(num_ranks=num_ranks, rank=rank, **fields)

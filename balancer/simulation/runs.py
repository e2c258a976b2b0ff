"""A named policy on a trace, and how fast the group could be: what the command line and the experiments ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from balancer.simulation.contenders import make_contender
from balancer.simulation.simulator import Simulation, SimulationConfig, SimulationResult
from balancer.simulation.trace import TraceRequest


def run_policy(name: str, config: SimulationConfig, trace: Sequence[TraceRequest], seed: int) -> SimulationResult:
    contender = make_contender(name)
    config = replace(config, reporting=contender.reporting(config.reporting))
    return Simulation(config, trace, contender.make_balancer, seed).run()


def capacity_per_s(config: SimulationConfig, trace: Sequence[TraceRequest]) -> float:
    """Requests per second that the ranks finish when the whole trace waits at time 0, spread by tokens."""
    plain = SimulationConfig(num_ranks=config.num_ranks, rank=config.rank)
    waiting = [replace(request, arrival_s=0.0) for request in trace]
    result = run_policy("least_tokens", plain, waiting, seed=0)
    return len(trace) / max(request.last_token_s or 0.0 for request in result.requests)

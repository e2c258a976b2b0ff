"""C3.4: one client in a hundred leaves early, and a rank restarts. What the books hold in the end, and who got the traffic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from balancer.ledger import LoadLedger
from balancer.load import RankView
from balancer.policies.vllm import Vllm
from balancer.simulation.simulator import Death, SimulationResult
from cores.messages import RankId
from scripts.experiments.common import (
    CONVERSATION,
    Case,
    Summary,
    contender,
    count,
    make_scenario,
    parse_options,
    print_table,
    run_cases,
    seconds,
)

LOAD, DISCONNECTS = 0.70, 0.01
REPEATS = 9  # more than 100,000 requests


class LeakyLedger(LoadLedger):
    """Takes nothing off the count of own requests when a client leaves: the fault of more than one router."""

    def __init__(self) -> None:
        super().__init__()
        self._leaked: dict[RankId, int] = {}

    def release(self, handle: int, abort_seq: int | None = None) -> bool:
        rank_id = self.rank_of(handle)
        if abort_seq is not None and rank_id is not None:
            self._leaked[rank_id] = self._leaked.get(rank_id, 0) + 1
        return super().release(handle, abort_seq)

    def views(self, rank_ids: Collection[RankId]) -> Sequence[RankView]:
        views = super().views(rank_ids)
        return [replace(view, own_in_flight=view.own_in_flight + self._leaked.get(view.rank_id, 0)) for view in views]


def last_tenth(result: SimulationResult) -> Summary:
    last = result.requests[-len(result.requests) // 10 :]
    return {"restarted": sum(request.rank == 0 for request in last) / len(last)}


def main() -> None:
    options = parse_options(__doc__, default_seeds=1)
    scenario = make_scenario(options, CONVERSATION)
    once = scenario.at(LOAD)
    span_s = len(once) / (len(once) - 1) * once[-1].arrival_s
    trace = [replace(r, arrival_s=r.arrival_s + i * span_s) for i in range(REPEATS) for r in once]
    config = scenario.with_config(disconnect_rate=DISCONNECTS, deaths=(Death(0, 0.85 * trace[-1].arrival_s, 30.0),))
    cases = [
        Case("released once, for whatever reason", contender("sound", Vllm), config, trace, last_tenth),
        Case("leaks one for each client that leaves", contender("leaky", Vllm, LeakyLedger), config, trace, last_tenth),
    ]
    columns = [
        count("requests"),
        ("left early", lambda summary: f"{summary['failed']:.0f}"),
        ("restarted rank's share of the last tenth", lambda summary: f"{summary['restarted']:.1%}"),
        ("TTFT p99, s", seconds("ttft_ms", "p99")),
    ]
    print("After every run the ledger of every front end is checked to be empty.\n")
    print_table(run_cases(cases, options), columns, head="own requests")


if __name__ == "__main__":
    main()

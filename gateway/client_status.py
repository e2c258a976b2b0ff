"""What an engine client looks like at one moment: its parts' counters and states, put together for `/status`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gateway.status import BalancerStatus, FrontEndStatus, StatusSnapshot, Totals
from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.async_llm import AsyncLLM
    from gateway.config import GatewayConfig
    from gateway.core_client import AsyncMPClient


def snapshot_of(llm: AsyncLLM, now: float, *, uptime_s: float, is_draining: bool) -> StatusSnapshot:
    client, balancer = llm.core_client, llm.config.balancer
    ranks = tuple(client.rank_statuses(now))
    ages = [rank.signal_age_ms for rank in ranks if rank.signal_age_ms is not None]
    policy, index = balancer.load_balancing_policy if len(ranks) > 1 else "none", client.ledger.prefix_index
    return StatusSnapshot(
        version=__version__,
        mode=type(client).__name__,
        model=llm.model_config.name,
        uptime_s=round(uptime_s, 3),
        state=_state(llm, [rank.state for rank in ranks], is_draining),
        front_ends=(_front_end(llm),),
        ranks=ranks,
        totals=_totals(llm),
        balancer=BalancerStatus(
            policy=policy,
            dispatch=balancer.dispatch,
            signal_age_ms=max(ages, default=None),
            prefix_landmarks=0 if index is None else index.num_blocks,
        ),
        events=client.events.events(now),
        group=client.group_status(now),
        max_loras=llm.config.engine.max_loras if llm.loras.is_enabled else 0,
        loras=llm.loras.statuses(llm.output_processor.count_by_lora),
    )


def balancer_at_start(config: GatewayConfig) -> BalancerStatus:
    """Before there are loads to tell of."""
    policy = config.balancer.load_balancing_policy if len(config.parallel.ranks) > 1 else "none"
    return BalancerStatus(policy=policy, dispatch=config.balancer.dispatch)


def starting_snapshot(client: AsyncMPClient, model: str, *, now: float, started_s: float) -> StatusSnapshot:
    """Before there is an engine client: how far the ranks are."""
    return StatusSnapshot(
        version=__version__,
        mode=type(client).__name__,
        model=model,
        uptime_s=round(now - started_s, 3),
        state="starting",
        front_ends=(FrontEndStatus(index=client.place.index, pid=os.getpid()),),
        ranks=tuple(client.rank_statuses(now)),
        events=client.events.events(now),
    )


def _front_end(llm: AsyncLLM) -> FrontEndStatus:
    return FrontEndStatus(
        index=llm.core_client.place.index,
        pid=os.getpid(),
        in_flight=llm.output_processor.num_unfinished,
        queued=llm.failover.num_waiting + len(llm.core_client.queued_handles),
        event_loop_lag_ms=llm.loop_lag.worst_ms,
    )


def _totals(llm: AsyncLLM) -> Totals:
    counters = llm.output_processor.counters
    return Totals(
        requests=llm.sender.num_requests,
        aborted=counters.aborted,
        failed=counters.failed,
        rejected=llm.admission.num_rejected,
        moved=llm.failover.num_moved,
        expired=llm.sender.num_expired,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        malformed_frames=llm.core_client.num_malformed_frames,
    )


def _state(llm: AsyncLLM, rank_states: list[str], is_draining: bool) -> str:
    if llm.errored or llm.is_stopped:
        return "dead"
    if is_draining:
        return "draining"
    if all(state == "ready" for state in rank_states):
        return "ready"
    return llm.core_client.standstill or "degraded"

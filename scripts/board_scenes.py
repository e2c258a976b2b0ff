"""Made-up status documents: a group under load with a dead, a stalled and a draining rank, for pictures and tests of the board.

The same second of the same group is always the same document.
"""

from __future__ import annotations

import math
import random
from typing import Any

from gateway.dashboard.board import Board
from gateway.dashboard.feed import Reading
from gateway.status import BalancerStatus, Event, FrontEndStatus, RankStatus, StatusSnapshot, Totals

URL = "http://gpu-00:8000"
RANKS_PER_NODE = 8
MAX_NUM_SEQS = 256
DEATH_S, STALL_S, DRAIN_S = 45.0, 20.0, 30.0  # in seconds of the scene
DEATH_CAUSE = "process 4242 was killed by signal 9 (SIGKILL)\nRay says: worker died"


def roles(num_ranks: int) -> dict[str, int]:
    """Which rank is what. Two ranks have no stalled one."""
    if num_ranks <= 2:
        return {"draining": 0, "dead": num_ranks - 1}
    return {"draining": 1, "dead": num_ranks // 2, "stalled": num_ranks - 2}


def _state(num_ranks: int, rank: int, at_s: float) -> str:
    start_s = {"dead": DEATH_S, "stalled": STALL_S + 60.0, "draining": DRAIN_S}
    for state, number in roles(num_ranks).items():
        if number == rank and at_s >= min(start_s[state], 50.0):
            return state
    return "ready"


def _rank(num_ranks: int, rank: int, at_s: float) -> RankStatus:
    rng = random.Random(rank * 1_000_003 + int(2 * at_s))
    phase = random.Random(rank).random() * math.tau
    wave = 0.65 + 0.3 * math.sin(at_s / 9 + phase) + 0.05 * rng.random()
    state = _state(num_ranks, rank, at_s)
    since_drain_s = at_s - DRAIN_S if state == "draining" else 0.0
    load = wave * max(0.0, 1 - since_drain_s / 40)
    running = int(MAX_NUM_SEQS * 0.8 * load)
    lives: dict[str, Any] = {}
    if state == "dead":
        lives = {
            "last_death_s_ago": at_s - DEATH_S,
            "death_cause": DEATH_CAUSE,
            "restarts": 1,
            "deaths": 1,
            "restart_pending": True,
        }
    elif num_ranks > 2 and rank == 3:
        lives = {
            "last_death_s_ago": 3000.0 + at_s,
            "death_cause": "CUDA error: an illegal memory access",
            "restarts": 2,
            "deaths": 2,
        }
    alive = state not in ("dead", "stalled")
    return RankStatus(
        rank=rank, epoch=1 + lives.get("restarts", 0), state=state, node=f"gpu-{rank // RANKS_PER_NODE:02d}", pid=4200 + rank,
        device=f"cuda:{rank % RANKS_PER_NODE} NVIDIA H200", max_num_seqs=MAX_NUM_SEQS, num_kv_blocks=32_768,
        waiting=int(max(0.0, 14 * (load - 0.75))) if alive else 0, running=running if alive else 0,
        kv_cache_usage=round(min(0.99, 0.12 + 0.85 * load), 4) if alive else 0.0,
        prefix_cache_hit_rate=round(0.55 + 0.1 * math.sin(phase), 4),
        queued_tokens=int(9000 * max(0.0, load - 0.6)), ledger_tokens=int(11_000 * max(0.0, load - 0.6)),
        prompt_tokens_per_s=round(4000 * load, 1) if alive else 0.0,
        generation_tokens_per_s=round(1800 * load, 1) if alive else 0.0,
        step_ms=round(17 + 14 * load + rng.random(), 3), signal_age_ms=round(1 + 22 * rng.random(), 1) if alive else None,
        last_seen_s=0.2 if state != "dead" else at_s - DEATH_S,
        prefill_speed_tokens_per_s=21_000.0, decode_speed_tokens_per_s=2600.0,
        requests_total=int(40 * at_s) + 90 * rank, requests_moved_away=18 if state == "dead" else 0,
        requests_moved_in=3 if state == "ready" else 0,
        prompt_tokens=int(4000 * at_s), generation_tokens=int(1800 * at_s), **lives,
    )  # fmt: skip


def _events(num_ranks: int, at_s: float) -> tuple[Event, ...]:
    who = roles(num_ranks)
    happened: list[tuple[float, str, int, str]] = [
        *((-7000.0 + i, "ready", i, f"epoch 1 is ready on gpu-{i // RANKS_PER_NODE:02d}") for i in range(num_ranks)),
        (DRAIN_S, "drain", who["draining"], "epoch 1 gets no new requests"),
        (
            DEATH_S,
            "death",
            who["dead"],
            "epoch 1 died with 18 requests in flight: process 4242 was killed by signal 9 (SIGKILL)",
        ),
        (DEATH_S + 0.1, "move", who["dead"], "18 requests of epoch 1 went on elsewhere"),
    ]
    if "stalled" in who:
        happened.append((52.0, "stall", who["stalled"], "epoch 1 stalled: it has work and made no step for 32.0 s"))
    return tuple(
        Event(seq=seq, age_s=round(at_s - when_s, 3), kind=kind, rank=rank, text=text)
        for seq, (when_s, kind, rank, text) in enumerate(happened, 1)
        if when_s <= at_s
    )


def status_at(num_ranks: int, at_s: float) -> StatusSnapshot:
    """`at_s` seconds into the scene; everything has happened after 55."""
    ranks = tuple(_rank(num_ranks, rank, at_s) for rank in range(num_ranks))
    num_front_ends = 1 if num_ranks <= 2 else 2
    in_flight = sum(rank.running + rank.waiting for rank in ranks)
    return StatusSnapshot(
        version="0.1.0",
        mode="DPLBAsyncMPClient",
        model="smollm2",
        uptime_s=7100 + at_s,
        state="ready" if all(rank.state == "ready" for rank in ranks) else "degraded",
        front_ends=tuple(
            FrontEndStatus(index=i, pid=4100 + i, in_flight=in_flight // num_front_ends, event_loop_lag_ms=0.6 + i)
            for i in range(num_front_ends)
        ),
        ranks=ranks,
        totals=Totals(
            requests=int(40 * num_ranks * at_s), aborted=12, failed=0, moved=18 if at_s >= DEATH_S else 0,
            prompt_tokens=int(4000 * num_ranks * at_s), generation_tokens=int(1800 * num_ranks * at_s),
        ),
        balancer=BalancerStatus(policy="prefix_affinity", dispatch="early", signal_age_ms=22.0),
        events=_events(num_ranks, at_s),
    )  # fmt: skip


def board_at(num_ranks: int, at_s: float, history_s: int = 60) -> Board:
    """What a board knows that has looked twice a second. Its clock is the scene's."""
    board = Board([URL])
    for half_s in range(2 * history_s, -1, -1):
        now = at_s - half_s / 2
        if now >= 0:
            board.note(0, Reading(URL, status_at(num_ranks, now)), now)
    return board

"""The names and types that dashboards and scripts read in `/status`: they are promised, from a server's first moment on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.status import Event, FrontEndStatus, RankStatus, StatusSnapshot

NUMBER, TEXT, MAYBE_NUMBER, MAYBE_TEXT = (int, float), str, (int, float, type(None)), (str, type(None))
DOCUMENT = {
    "version": TEXT, "mode": TEXT, "model": TEXT, "uptime_s": NUMBER, "state": TEXT, "front_ends": list, "ranks": list,
    "totals": dict, "balancer": dict, "events": list,
}  # fmt: skip
FRONT_END = {"index": int, "pid": int, "in_flight": int, "queued": int, "event_loop_lag_ms": NUMBER}
RANK = {
    "rank": int, "epoch": int, "state": TEXT, "node": TEXT, "pid": MAYBE_NUMBER, "device": TEXT, "waiting": int, "running": int,
    "kv_cache_usage": NUMBER, "prefix_cache_hit_rate": NUMBER, "queued_tokens": int, "prompt_tokens_per_s": NUMBER,
    "generation_tokens_per_s": NUMBER, "step_ms": NUMBER, "last_seen_s": MAYBE_NUMBER, "signal_age_ms": MAYBE_NUMBER,
    "ledger_tokens": int, "restarts": int, "requests_total": int, "requests_moved_away": int, "requests_moved_in": int,
    "last_death_s_ago": MAYBE_NUMBER, "death_cause": MAYBE_TEXT,
}  # fmt: skip
TOTALS = ("requests", "aborted", "failed", "rejected", "moved", "prompt_tokens", "generation_tokens")
BALANCER = {"policy": TEXT, "dispatch": TEXT, "signal_age_ms": MAYBE_NUMBER}
EVENT = {"seq": int, "age_s": NUMBER, "kind": TEXT, "rank": MAYBE_NUMBER, "text": TEXT}


def check(value: dict[str, Any], promised: dict[str, Any]) -> None:
    for name, kind in promised.items():
        assert isinstance(value[name], kind), (name, value[name])


def check_document(document: dict[str, Any]) -> None:
    check(document, DOCUMENT)
    check(document["totals"], dict.fromkeys(TOTALS, int))
    check(document["balancer"], BALANCER)
    for name, promised in (("front_ends", FRONT_END), ("ranks", RANK), ("events", EVENT)):
        for row in document[name]:
            check(row, promised)


@pytest.mark.parametrize("moment", ["before its ranks are known", "while they start", "ready"])
async def test_status_has_what_is_promised_from_the_first_moment_on(serve: Any, moment: str) -> None:
    served = await serve()
    if moment != "ready":
        served.state.engine = None
    if moment == "while they start":
        starting = StatusSnapshot(
            version="1", mode="AsyncMPClient", model="m", uptime_s=0.5, state="starting",
            front_ends=(FrontEndStatus(index=0, pid=1),), ranks=(RankStatus(rank=0, epoch=0, state="starting"),),
            events=(Event(seq=1, age_s=0.1, kind="scale", rank=None, text="added"),),
        )  # fmt: skip
        served.state.starting_status = lambda: starting
    document = json.loads((await served.get("/status"))[1])
    check_document(document)
    assert document["mode"] == "AsyncMPClient" or moment == "ready"
    assert document["state"] == ("ready" if moment == "ready" else "starting")

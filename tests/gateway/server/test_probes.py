"""Health that does not lie: what probes and scrapers see while the engine starts, serves, degrades, drains and dies."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import EngineDeadError, OverloadedError
from gateway.status import RankStatus, StatusSnapshot
from gateway.version import __version__
from tests.gateway.conftest import raw_post

CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}


def rank(number: int, state: str) -> RankStatus:
    return RankStatus(rank=number, epoch=1, state=state)


async def probes(served: Any) -> tuple[int, int, int]:
    """(health, ready, live)"""
    health, ready, live = [(await served.get(path))[0] for path in ("/health", "/ready", "/live")]
    return health, ready, live


async def test_while_starting_only_live_says_yes(serve: Any) -> None:
    served = await serve(ready=False)
    assert await probes(served) == (503, 503, 200)
    status, text, _ = await served.get("/status")
    assert (status, json.loads(text)["state"]) == (200, "starting")
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        status, body, response = await served.post(path, CHAT_BODY)
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert int(response.headers["Retry-After"]) >= 1
    assert (await served.get("/v1/models"))[0] == 503
    assert (await served.get("/metrics"))[0] == 200


async def test_the_launchers_view_is_shown_while_starting(serve: Any) -> None:
    served = await serve(ready=False)
    starting = StatusSnapshot(version="1", mode="m", model="smol", uptime_s=2.0, state="starting", ranks=(rank(0, "starting"),))
    served.state.starting_status = lambda: starting
    assert json.loads((await served.get("/status"))[1])["ranks"][0]["state"] == "starting"


async def test_a_serving_engine_is_healthy_and_ready_with_an_empty_body(serve: Any) -> None:
    served = await serve()
    assert await probes(served) == (200, 200, 200)
    assert (await served.get("/health"))[1] == ""


@pytest.mark.parametrize(
    ("states", "health"),
    [
        (("ready", "ready"), 200),
        (("dead", "ready"), 200),
        (("suspect", "dead"), 200),
        (("stalled", "dead"), 503),
        (("starting", "restarting"), 503),
        ((), 503),
    ],
)
async def test_health_needs_one_rank_that_serves(serve: Any, states: tuple[str, ...], health: int) -> None:
    served = await serve()
    served.engine.ranks = tuple(rank(i, state) for i, state in enumerate(states))
    assert await probes(served) == (health, health, 200)


async def test_a_dead_engine_is_neither_healthy_nor_ready_and_fails_requests_at_once(serve: Any) -> None:
    served = await serve()
    served.engine.death = EngineDeadError("rank 0 died: out of memory", 0)
    assert await probes(served) == (503, 503, 200)
    status, body, _ = await served.post("/v1/chat/completions", CHAT_BODY)
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    assert "out of memory" in body["error"]["message"]


async def test_draining_and_full_servers_are_healthy_but_not_ready(serve: Any) -> None:
    served = await serve()
    served.engine.overload = OverloadedError("the server is full")
    assert await probes(served) == (200, 503, 200)
    assert "full" in (await served.get("/ready"))[1]
    served.engine.overload = None
    served.engine.start_draining()
    assert await probes(served) == (200, 503, 200)
    assert (await served.post("/v1/chat/completions", CHAT_BODY))[0] == 503


async def test_a_server_that_will_end_says_so_and_serves_what_still_comes_without_keeping_connections(serve: Any) -> None:
    served = await serve()
    served.state.is_leaving = True
    assert await probes(served) == (200, 503, 200)
    assert json.loads((await served.get("/status"))[1])["state"] == "draining"
    for body in (CHAT_BODY, CHAT_BODY | {"stream": True}):
        reader, _ = await served.raw(raw_post("/v1/chat/completions", body))
        answer = await reader.read()  # to the end of the connection, which the client has not asked for
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nConnection: close\r\n" in answer
        assert b"Hello" in answer


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_probes_may_ask_for_headers_alone(serve: Any, ready: bool, status: int) -> None:
    served = await serve(ready=ready)
    for path in ("/health", "/ready"):
        async with served.http.head(served.url + path) as response:
            assert (response.status, await response.read()) == (status, b"")


async def test_status_is_the_snapshots_document(serve: Any) -> None:
    served = await serve()
    served.engine.ranks = (replace(rank(0, "ready"), generation_tokens_per_s=41.5, death_cause='was "bad"'),)
    document = json.loads((await served.get("/status"))[1])
    assert document == json.loads(json.dumps(served.engine.status().to_document()))
    assert document["ranks"][0]["death_cause"] == 'was "bad"'


async def test_metrics_carry_the_configured_prefix(serve: Any) -> None:
    served = await serve(metrics_prefix="vllm:")
    status, text, response = await served.get("/metrics")
    assert status == 200
    assert response.headers["Content-Type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 0.0' in text
    assert "gateway:" not in text


async def test_version_is_the_packages(serve: Any) -> None:
    served = await serve()
    _, text, response = await served.get("/version")
    assert json.loads(text) == {"version": __version__}
    assert response.headers["Server"] == f"gateway/{__version__}"


async def test_probes_leave_no_log_lines(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = await serve()
    await probes(served)
    assert caplog.records == []

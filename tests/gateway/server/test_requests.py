"""Clients cancel what they have asked for, over another connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.testing import waits
from tests.gateway.conftest import Served

DEADLINE_S = 60.0


async def ask(served: Served, request_id: str, number: int, **headers: str) -> asyncio.Task[Any]:
    """A chat that has begun and has said a word."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    task = asyncio.create_task(served.post("/v1/chat/completions", body, **{"X-Request-Id": request_id}, **headers))
    (await served.engine.next_request(number)).put("Hel")
    return task


async def end_of(task: asyncio.Task[Any]) -> tuple[str, str]:
    _, answer, _ = await asyncio.wait_for(task, DEADLINE_S)
    return answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize("request_id", ["mine", "chatcmpl-mine", "a%2Fb"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_cancelled_request_ends_with_what_it_had(serve: Any, method: str, request_id: str) -> None:
    served = await serve(waits)
    task = await ask(served, "a/b" if "%" in request_id else "mine", 0)
    path = f"{served.url}/v1/requests/{request_id}" + "/cancel" * (method == "POST")
    for status in (200, 404):  # the second one finds that it has ended
        async with served.http.request(method, path) as response:
            assert response.status == status
            document = await response.json()
        if status == 200:
            assert document == {"status": "cancelled", "request_id": request_id.replace("%2F", "/")}
            assert await end_of(task) == ("Hel", "abort")
    assert document["error"]["code"] == "request_not_found"
    assert request_id.replace("%2F", "/") in document["error"]["message"]


async def test_of_many_those_that_were_there_are_named(serve: Any) -> None:
    served = await serve(waits)
    tasks = [await ask(served, request_id, i) for i, request_id in enumerate(["one", "two", "three"])]
    status, answer, _ = await served.post("/v1/requests/cancel", {"request_ids": ["one", "unknown", "three", "one"]})
    assert (status, answer) == (200, {"status": "cancelled", "cancelled_request_ids": ["one", "three"]})
    assert [await end_of(tasks[i]) for i in (0, 2)] == [("Hel", "abort")] * 2
    assert not tasks[1].done()
    status, answer, _ = await served.post("/v1/requests/cancel", {"request_ids": []})
    assert (status, answer["cancelled_request_ids"]) == (200, [])
    status, answer, _ = await served.post("/v1/requests/cancel", {"request_ids": ["x"] * 1025})
    assert (status, answer["error"]["param"]) == (400, "request_ids")
    served.engine.requests[1].put("lo", finish_reason="stop")
    assert await end_of(tasks[1]) == ("Hello", "stop")


async def test_nobody_cancels_another_keys_request(serve: Any) -> None:
    served = await serve(waits, api_key=("secret", "other"))
    task = await ask(served, "mine", 0, Authorization="Bearer secret")
    path = f"{served.url}/v1/requests/mine"
    for key, status in (("wrong", 401), ("other", 404), ("secret", 200)):
        async with served.http.delete(path, headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == status
    assert await end_of(task) == ("Hel", "abort")

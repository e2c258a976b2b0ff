"""The development routes: absent unless asked for, behind the key, and in vLLM's words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import EngineGenerateError, InvalidRequestError
from gateway.testing import waits

POSTS = (
    "/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/reset_mm_cache", "/collective_rpc", "/update_weights",
    "/abort_requests", "/start_profile", "/stop_profile",
)  # fmt: skip
GETS = ("/is_sleeping", "/is_paused")


async def call(served: Any, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with served.http.request(method, served.url + path, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, await response.json() if text else None


async def test_without_development_mode_there_is_no_such_route(serve: Any) -> None:
    served = await serve()
    for path in POSTS:
        assert (await call(served, "POST", path))[0] == 404
    for path in GETS:
        assert (await call(served, "GET", path))[0] == 404


async def test_they_need_the_key_when_there_is_one(serve: Any) -> None:
    served = await serve(dev_mode=True, api_key=("secret",))
    for method, path in [("POST", path) for path in POSTS] + [("GET", path) for path in GETS]:
        assert (await call(served, method, path))[0] == 401
    assert served.engine.utility_calls == []
    assert (await call(served, "POST", "/resume", Authorization="Bearer secret"))[0] == 200


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        ("/sleep", [("sleep", 1, "abort")]),
        ("/sleep?level=2&mode=keep", [("sleep", 2, "keep")]),
        ("/wake_up", [("wake_up", None)]),
        ("/wake_up?tags=weights", [("wake_up", ["weights"])]),
        ("/wake_up?tags=weights&tags=kv_cache", [("wake_up", ["weights", "kv_cache"])]),
        ("/pause", [("pause", "abort", True)]),
        ("/pause?mode=wait&clear_cache=false", [("pause", "wait", False)]),
        ("/resume", [("resume",)]),
        ("/reset_prefix_cache", [("reset_prefix_cache", False)]),
        ("/reset_prefix_cache?reset_running_requests=true", [("reset_prefix_cache", True)]),
        ("/reset_mm_cache", [("reset_mm_cache",)]),
        ("/reset_encoder_cache", [("reset_encoder_cache",)]),
        ("/start_profile", [("start_profile",)]),
    ],
)
async def test_a_post_is_one_call_to_every_rank(serve: Any, path: str, calls: list[Any]) -> None:
    served = await serve(dev_mode=True)
    assert (await call(served, "POST", path))[0] == 200
    assert served.engine.utility_calls == calls


async def test_answers_are_those_of_vllm(serve: Any) -> None:
    served = await serve(dev_mode=True)
    served.engine.utility_results = {
        "is_sleeping": True, "is_paused": False, "collective_rpc": {"x": [1]}, "get_weight_version": 2, "stop_profile": "/t/1",
    }  # fmt: skip
    assert await call(served, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert await call(served, "GET", "/is_paused") == (200, {"is_paused": False})
    assert await call(served, "POST", "/pause") == (200, {"status": "paused"})
    assert await call(served, "POST", "/resume") == (200, {"status": "resumed"})
    rpc = {"method": "f", "args": [1], "kwargs": {"k": "v"}, "timeout": 3}
    assert await call(served, "POST", "/collective_rpc", rpc) == (200, {"results": [{"x": [1]}]})
    assert served.engine.utility_calls[-1] == ("collective_rpc", "f", [1], {"k": "v"})
    assert await call(served, "POST", "/stop_profile") == (200, {"files": ["/t/1"]})
    assert await call(served, "POST", "/sleep") == (200, None)


@pytest.mark.parametrize("body", [{"update_info": {"directory": "/w", "version": 9}}, {"directory": "/w", "version": 9}])
async def test_new_weights_come_from_a_directory_with_their_version(serve: Any, body: dict[str, Any]) -> None:
    served = await serve(dev_mode=True)
    assert await call(served, "POST", "/update_weights", body) == (200, {"message": "Weights updated", "version": 9})
    assert served.engine.utility_calls == [("prepare_weights", "/w"), ("commit_weights", "/w", 9)]


async def test_abort_requests_ends_them_by_id(serve: Any) -> None:
    served = await serve(waits, dev_mode=True)
    headers = {"X-Request-Id": "mine"}
    answer = asyncio.ensure_future(call(served, "POST", "/v1/completions", {"prompt": "x"}, **headers))
    await served.engine.next_request()
    assert (await call(served, "POST", "/abort_requests", {"request_ids": ["other", "mine"]}))[0] == 200
    _, body = await answer
    assert body["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=3", None, "level"),
        ("/sleep?level=one", None, "level"),
        ("/sleep?mode=soon", None, "mode"),
        ("/pause?mode=soon", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/wake_up?tags=gpu", None, "tags"),
        ("/collective_rpc", {"args": []}, "method"),
        ("/collective_rpc", {"method": "f", "timeout": 0}, "timeout"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {"directory": "/w", "version": -1}}, "version"),
        ("/abort_requests", {}, "request_ids"),
    ],
)
async def test_bad_values_are_400_and_name_the_field(serve: Any, path: str, body: Any, param: str) -> None:
    served = await serve(dev_mode=True)
    status, answer = await call(served, "POST", path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert served.engine.utility_calls == []


async def test_what_a_rank_refuses_is_400_and_what_breaks_in_it_500(serve: Any) -> None:
    served = await serve(dev_mode=True)
    served.engine.utility_results = {
        "resume": InvalidRequestError("rank 0 (epoch 1): it sleeps"),
        "wake_up": EngineGenerateError("rank 0 (epoch 1): RuntimeError: out of memory"),
    }
    status, answer = await call(served, "POST", "/resume")
    assert (status, answer["error"]["message"]) == (400, "rank 0 (epoch 1): it sleeps")
    assert (await call(served, "POST", "/wake_up"))[0] == 500


async def test_they_wait_for_no_engine(serve: Any) -> None:
    served = await serve(dev_mode=True, ready=False)
    assert (await call(served, "POST", "/sleep"))[0] == 503

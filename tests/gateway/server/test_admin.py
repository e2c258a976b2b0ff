"""The operator's routes over a fake engine: what is ordered, and how refusals look."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import EngineDeadError, InvalidRequestError


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        ("/admin/ranks/0/drain", None, ("drain", {"rank": 0})),
        ("/admin/ranks/0/undrain", None, ("undrain", {"rank": 0})),
        ("/admin/ranks/0/restart", None, ("restart", {"rank": 0, "drain_timeout_s": 30.0})),
        ("/admin/ranks/0/restart", {"drain_timeout": 2}, ("restart", {"rank": 0, "drain_timeout_s": 2.0})),
        ("/scale_elastic_ep", {"new_data_parallel_size": 3}, ("scale", {"size": 3, "drain_timeout_s": 30.0})),
    ],
)
async def test_each_route_gives_one_order(serve: Any, path: str, body: Any, order: tuple[str, Any]) -> None:
    served = await serve()
    async with served.http.post(served.url + path, json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    assert served.engine.orders == [order]
    if "/admin/" in path:
        assert answer == {"rank": 0, "state": "ready", "epoch": 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/admin/ranks/x/drain", None, 404, "rank"),
        ("/admin/ranks/-1/drain", None, 404, "rank"),
        ("/admin/ranks/5000/restart", None, 404, "rank"),
        ("/admin/ranks/0/restart", {"drain_timeout": -1}, 400, "drain_timeout"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 0}, 400, "new_data_parallel_size"),
        ("/scale_elastic_ep", {}, 400, "new_data_parallel_size"),
    ],
)
async def test_bad_orders_name_the_field(serve: Any, path: str, body: Any, status: int, param: str) -> None:
    served = await serve()
    async with served.http.post(served.url + path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], served.engine.orders) == (status, param, [])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("rank 7 does not exist; the ranks are 0", status=404), 404),
        (InvalidRequestError("rank 0 is being restarted", status=409), 409),
        (EngineDeadError("rank 0 ended and did not come back"), 503),
    ],
)
async def test_refusals_of_the_group_reach_the_operator(serve: Any, error: Exception, status: int) -> None:
    served = await serve()
    served.engine.order_error = error
    async with served.http.post(served.url + "/admin/ranks/0/restart") as response:
        answer = await response.json()
    assert (response.status, answer["error"]["message"]) == (status, str(error))

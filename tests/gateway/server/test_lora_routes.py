"""Adapters over HTTP: they come, are listed beside the model, are used by name, and go."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import InvalidRequestError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


async def post_text(served: Any, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with served.http.post(served.url + path, json=body) as response:
        return response.status, await response.text()


async def test_an_adapter_comes_is_listed_and_goes(serve: Any) -> None:
    served = await serve(served_model_name=("base", "alias"))
    assert await post_text(served, LOAD, SQL) == (200, "Success: LoRA adapter 'sql' added successfully.")
    async with served.http.get(served.url + "/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        ("base", None, "/models/fake"), ("alias", None, "/models/fake"), ("sql", "base", "/adapters/sql"),
    ]  # fmt: skip
    async with served.http.get(served.url + "/v1/models/sql") as response:
        assert await response.json() == cards[2]
    assert await post_text(served, UNLOAD, {"lora_name": "sql"}) == (
        200, "Success: LoRA adapter 'sql' removed successfully.",
    )  # fmt: skip
    status, body, _ = await served.post("/v1/completions", {"model": "sql", "prompt": "x"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello?"}]}),
    ],
)
async def test_a_request_for_the_model_of_its_name_runs_with_the_adapter(serve: Any, path: str, body: dict[str, Any]) -> None:
    served = await serve(served_model_name=("base",))
    await post_text(served, LOAD, SQL)
    for model, adapter in (("sql", "sql"), ("base", None), (None, None)):
        served.engine.requests.clear()
        status, answer, _ = await served.post(path, {**body, "model": model, "max_tokens": 3})
        assert (status, answer["model"]) == (200, model or "base")
        assert {request.options["lora_request"] for request in served.engine.requests} == {adapter}


async def test_tokenizing_knows_the_names_of_adapters_too(serve: Any) -> None:
    served = await serve()
    await post_text(served, LOAD, SQL)
    status, _, _ = await served.post("/tokenize", {"model": "sql", "prompt": "x"})
    assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_name": "sql"}, "lora_path"),
        (LOAD, {"lora_path": "/x"}, "lora_name"),
        (LOAD, {**SQL, "lora_path": 5}, "lora_path"),
        (LOAD, {**SQL, "load_inplace": "yes"}, "load_inplace"),
        (UNLOAD, {}, "lora_name"),
    ],
)
async def test_bad_bodies_name_the_field(serve: Any, path: str, body: dict[str, Any], param: str) -> None:
    served = await serve()
    status, answer, _ = await served.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_errors_of_the_engine_client_keep_their_status(serve: Any) -> None:
    served = await serve()
    await post_text(served, LOAD, SQL)
    status, answer, _ = await served.post(LOAD, SQL)
    assert (status, answer["error"]["param"]) == (400, "lora_name")
    assert "has already been loaded" in answer["error"]["message"]
    assert (await post_text(served, LOAD, {**SQL, "load_inplace": True}))[0] == 200
    assert (await served.post(UNLOAD, {"lora_name": "chat"}))[0] == 404
    served.engine.loras.error = InvalidRequestError("rank 0: no such directory", "lora_path", status=404)
    assert (await served.post(LOAD, {**SQL, "lora_name": "new"}))[0] == 404


async def test_without_a_key_nobody_changes_adapters(serve: Any) -> None:
    served = await serve(api_key=("secret",))
    for path, body in ((LOAD, SQL), (UNLOAD, {"lora_name": "sql"})):
        assert (await served.post(path, body))[0] == 401
    async with served.http.post(served.url + LOAD, json=SQL, headers={"Authorization": "Bearer secret"}) as response:
        assert response.status == 200


async def test_adapters_wait_for_the_engine(serve: Any) -> None:
    served = await serve(ready=False)
    assert (await served.post(LOAD, SQL))[0] == 503

"""Adapters of a running server: over HTTP, on every rank, seen by every front end, and back after any of them died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

Serve = Callable[..., Any]
Poll = Callable[..., Any]


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """Any directory is an adapter of the simulated engine."""
    for name in ("sql", "chat"):
        (tmp_path / name).mkdir()
    return {name: str(tmp_path / name) for name in ("sql", "chat")}


async def post(url: str, path: str, **body: Any) -> tuple[int, Any]:
    """Over a connection of its own, so that any front end may get it."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        return response.status, await (response.json() if "json" in response.content_type else response.text())


async def texts(url: str, model: str) -> set[str]:
    """What a model answers to one prompt, on both ranks, through whichever front end."""
    fields = {"model": model, "prompt": "one two three", "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    answers = await asyncio.gather(*(post(url, "/v1/completions", **fields) for _ in range(12)))
    assert [answer for status, answer in answers if status != 200] == []
    return {answer["choices"][0]["text"] for _, answer in answers}


def models(server: Any) -> list[tuple[str, str | None]]:
    return [(card["id"], card["parent"]) for card in server.get("/v1/models").json()["data"]]


async def test_adapters_come_stay_and_go(serve: Serve, simulated: list[str], adapters: dict[str, str], poll: Poll) -> None:
    server = serve(
        *simulated, "-dp", "2", "--api-server-count", "2", "--enable-lora", "--lora-modules", f"sql={adapters['sql']}"
    )  # fmt: skip
    assert (await post(server.url, "/v1/load_lora_adapter", lora_name="x", lora_path="/no/such"))[0] == 404
    status, text = await post(server.url, "/v1/load_lora_adapter", lora_name="chat", lora_path=adapters["chat"])
    assert (status, text) == (200, "Success: LoRA adapter 'chat' added successfully.")
    expected = [("tiny", None), ("sql", "tiny"), ("chat", "tiny")]
    assert all(models(server) == expected for _ in range(6)), "whichever front end is asked"
    answers = {model: await texts(server.url, model) for model in ("tiny", "sql", "chat")}
    assert all(len(text) == 1 for text in answers.values()), "the same on every rank"
    assert len(set.union(*answers.values())) == 3
    idle = 'lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""}'
    await asyncio.to_thread(poll, lambda: idle in server.get("/metrics").text, "no adapter has requests any more")

    os.kill(server.rank(1)["pid"], signal.SIGKILL)
    await asyncio.to_thread(poll, lambda: is_back(server), "rank 1 is ready again")
    assert await texts(server.url, "chat") == answers["chat"]

    front_ends = {row["index"]: row["pid"] for row in server.status()["front_ends"]}
    os.kill(front_ends[0], signal.SIGKILL)
    await asyncio.to_thread(poll, lambda: is_replaced(server, front_ends[0]), "front end 0 is replaced")
    assert all(models(server) == expected for _ in range(6))

    assert (await post(server.url, "/v1/unload_lora_adapter", lora_name="sql"))[0] == 200
    assert [(await post(server.url, "/v1/completions", model="sql", prompt="x"))[0] for _ in range(4)] == [404] * 4
    assert await texts(server.url, "chat") == answers["chat"]
    assert server.status()["loras"][0]["name"] == "chat"
    await asyncio.to_thread(poll, lambda: len(server.status()["loras"]) == 1, "the removed one is not used any more")


def is_back(server: Any) -> bool:
    row = server.rank(1)
    return bool(row["state"] == "ready" and row["epoch"] == 2)


def is_replaced(server: Any, old_pid: int) -> bool:
    rows = server.status()["front_ends"]
    return len(rows) == 2 and old_pid not in [row["pid"] for row in rows]


async def test_a_server_without_lora_says_how_to_have_it(serve: Serve, simulated: list[str], adapters: dict[str, str]) -> None:
    server = serve(*simulated)
    status, answer = await post(server.url, "/v1/load_lora_adapter", lora_name="sql", lora_path=adapters["sql"])
    assert (status, answer["error"]["message"]) == (400, "this server serves no LoRA adapters; start it with --enable-lora")
    assert "lora_requests_info" not in server.get("/metrics").text

"""What front ends of one endpoint see of each other's adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.lora_store import LoraAdapter, LoraStore, OwnLoraStore, SharedLoraStore

SQL = LoraAdapter(name="sql", path="/adapters/sql", id="5e")
CHAT = LoraAdapter(name="chat", path="/adapters/chat", id="c4", is_pinned=True)


@pytest.fixture(params=["own", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LoraStore:
    return OwnLoraStore() if request.param == "own" else SharedLoraStore(tmp_path / "loras.json")


def test_nothing_is_known_until_somebody_has_said_something(store: LoraStore) -> None:
    assert store.read() is None
    store.write({})
    assert store.read() == {}


def test_what_was_written_last_is_read(store: LoraStore) -> None:
    for adapters in ({"sql": SQL}, {"sql": SQL, "chat": CHAT}, {"chat": CHAT}):
        store.write(adapters)
        assert store.read() == adapters


async def test_the_lock_is_held_by_one_at_a_time(store: LoraStore) -> None:
    inside = []

    async def hold(name: str) -> None:
        async with store.locked():
            inside.append(f"{name} in")
            await asyncio.sleep(0)
            inside.append(f"{name} out")

    await asyncio.gather(hold("a"), hold("b"))
    assert inside == ["a in", "a out", "b in", "b out"]


def test_every_front_end_sees_what_another_one_wrote(tmp_path: Path) -> None:
    stores = [SharedLoraStore(tmp_path / "loras.json") for _ in range(2)]
    for i in range(20):
        adapters = {"sql": LoraAdapter(name="sql", path="/x", id=f"{i:02}")}
        stores[i % 2].write(adapters)
        assert [store.read() for store in stores] == [adapters, adapters]


async def test_another_process_waits_for_the_lock_until_it_is_given_back(tmp_path: Path) -> None:
    first, second = SharedLoraStore(tmp_path / "loras.json"), SharedLoraStore(tmp_path / "loras.json")
    entered = asyncio.Event()

    async def enter() -> None:
        async with second.locked():
            entered.set()

    async with first.locked():
        waiter = asyncio.create_task(enter())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(entered.wait()), 0.05)
    await asyncio.wait_for(waiter, 60)

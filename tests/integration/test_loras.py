"""Adapters of an embedded `AsyncLLM` over two ranks, one of which dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gateway.config import FaultConfig
from gateway.errors import EngineGenerateError, InvalidRequestError
from tests.integration.llm_harness import FINAL_ONLY, Start, params, until


async def test_adapters_are_used_by_name_restored_with_a_rank_and_avoided_where_they_cannot_be(
    start: Start, tmp_path: Path
) -> None:
    for name in ("sql", "chat"):
        (tmp_path / name).mkdir()
    llm = await start(engine_settings={"enable_lora": True}, fault_tolerance=FaultConfig(engine_restarts=1))
    adapters = [await llm.add_lora(name, str(tmp_path / name)) for name in ("sql", "chat")]
    await llm.pin_lora("sql")
    assert [adapter.id for adapter in await llm.list_loras()] == [adapter.id for adapter in adapters]

    async def run(adapter: str | None, rank: int | None = None) -> tuple[str, int | None]:
        outputs = llm.generate("x", params(9, output_kind=FINAL_ONLY), "r", lora_request=adapter, data_parallel_rank=rank)
        async for output in outputs:
            return output.outputs[0].text, output.rank
        raise AssertionError("no output")

    before = {(adapter, rank): (await run(adapter, rank))[0] for adapter in (None, "sql", "chat") for rank in (0, 1)}
    assert len(set(before.values())) == 3
    with pytest.raises(InvalidRequestError, match="'other' cannot be found; loaded: 'sql', 'chat'"):
        await run("other")

    (tmp_path / "chat").rmdir()
    pid = llm.status().ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: (llm.status().ranks[1].epoch, llm.status().ranks[1].state) == (2, "ready"), "rank 1 is back")
    assert (await run("sql", 1))[0] == before["sql", 1]
    assert [await run("chat") for _ in range(4)] == [(before["chat", 0], 0)] * 4
    with pytest.raises(EngineGenerateError, match="adapter 'chat' is not loaded on this rank; loaded: 'sql'"):
        await run("chat", 1)
    await llm.remove_lora("chat")
    with pytest.raises(InvalidRequestError, match="cannot be found"):
        await run("chat")

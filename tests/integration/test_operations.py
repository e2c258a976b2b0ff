"""Pause, sleep and new weights on two real engine processes, as an embedded engine client does it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cores.testing import make_tiny_model_dir
from gateway import AsyncLLM
from gateway.config import FaultConfig
from gateway.errors import EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.outputs import RequestOutput
from tests.integration.llm_harness import (
    DEADLINE_S,
    DELTA,
    FINAL_ONLY,
    SLOW_MS,
    Start,
    collect,
    params,
    set_step_ms,
    until,
)

NUM_TOKENS = 300
FAST_MS = 1.0


class Reader:
    """Reads one stream on a given rank."""

    def __init__(self, llm: AsyncLLM, rank: int) -> None:
        self.outputs: list[RequestOutput] = []
        self._stream = llm.generate(f"prompt {rank}", params(NUM_TOKENS, output_kind=DELTA), "r", data_parallel_rank=rank)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self._stream:
            self.outputs.append(output)

    @property
    def text(self) -> str:
        return "".join(output.outputs[0].text for output in self.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    async def end(self) -> str | None:
        """Its finish reason."""
        await asyncio.wait_for(self.task, DEADLINE_S)
        return self.outputs[-1].outputs[0].finish_reason


async def begin(llm: AsyncLLM) -> list[Reader]:
    """A stream on each rank, both under way and, as long as nobody makes the ranks fast again, far from their ends."""
    await set_step_ms(llm, SLOW_MS)
    readers = [Reader(llm, rank) for rank in range(2)]
    await until(lambda: all(reader.num_tokens >= 3 for reader in readers), "both have begun")
    return readers


async def expected_texts(llm: AsyncLLM) -> list[str]:
    finals = [await collect(llm, f"prompt {rank}", params(NUM_TOKENS, output_kind=FINAL_ONLY)) for rank in range(2)]
    return [final.outputs[0].text for (final,) in finals]


async def pause_in_place(llm: AsyncLLM) -> None:
    await llm.pause_generation("keep", clear_cache=False)
    assert await llm.is_paused()
    assert llm.status().state == "paused"


async def pause_and_forget(llm: AsyncLLM) -> None:
    await llm.pause_generation("keep")


async def fall_asleep(llm: AsyncLLM) -> None:
    await llm.sleep(2, "keep")
    assert await llm.is_sleeping()
    assert llm.status().state == "sleeping"
    with pytest.raises(InvalidRequestError, match="it sleeps"):
        await llm.resume_generation()


async def wake_up(llm: AsyncLLM) -> None:
    await llm.wake_up(["weights"])
    assert await llm.is_sleeping()
    with pytest.raises(OverloadedError, match="sleeping"):
        await collect(llm, "late", params(1))
    await llm.wake_up(["kv_cache"])
    assert not await llm.is_sleeping()


async def test_streams_that_are_kept_halt_and_go_on_with_the_same_text(start: Start) -> None:
    llm = await start(2, step_ms=FAST_MS)
    texts = await expected_texts(llm)
    for halt, go_on in (
        (pause_in_place, AsyncLLM.resume_generation),
        (pause_and_forget, AsyncLLM.resume_generation),
        (fall_asleep, wake_up),
    ):
        readers = await begin(llm)
        await halt(llm)
        # Behind the answer nothing comes: two more questions to and fro find every stream where it was.
        await llm.is_paused()
        halted = [reader.num_tokens for reader in readers]
        await llm.is_paused()
        assert [reader.num_tokens for reader in readers] == halted
        assert max(halted) < NUM_TOKENS
        assert {rank.state for rank in llm.status().ranks} in ({"paused"}, {"sleeping"})
        with pytest.raises(OverloadedError, match="takes no requests"):
            await collect(llm, "late", params(1))
        await go_on(llm)
        await set_step_ms(llm, FAST_MS)
        assert [await reader.end() for reader in readers] == ["length", "length"]
        assert [reader.text for reader in readers] == texts
        await until(lambda: llm.status().state == "ready", "all is as before")


async def test_pause_ends_streams_with_what_they_have_or_waits_for_them_and_rejects_late_ones(start: Start) -> None:
    llm = await start(2)
    readers = await begin(llm)
    await llm.pause_generation()
    assert [await reader.end() for reader in readers] == ["abort", "abort"]
    assert all(3 <= reader.num_tokens < NUM_TOKENS for reader in readers)
    with pytest.raises(OverloadedError):
        llm.check_admission()
    await llm.check_health()
    await llm.resume_generation()

    readers = await begin(llm)
    with pytest.raises(EngineGenerateError, match=r"pause was not done within 0.01 s on rank 0 \(epoch 1\), rank 1"):
        await llm.call_utility("pause", "wait", timeout_s=0.01)
    pausing = asyncio.create_task(llm.pause_generation("wait"))
    # Whether it reaches a closed engine or is refused before: it comes too late.
    with pytest.raises(OverloadedError, match="draining"):
        await collect(llm, "late", params(1))
    assert not pausing.done()
    await set_step_ms(llm, FAST_MS)
    assert [await reader.end() for reader in readers] == ["length", "length"]
    await asyncio.wait_for(pausing, DEADLINE_S)
    assert await llm.is_paused()
    await llm.resume_generation()
    assert (await collect(llm, "x", params(2)))[-1].finished


async def test_a_rank_that_starts_again_is_what_the_others_are_before_it_serves(start: Start, model: Path) -> None:
    llm = await start(2, fault_tolerance=FaultConfig(engine_restarts=1))
    await llm.update_weights(str(model), 7)
    await llm.pause_generation()
    pid = llm.status().ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(
        lambda: llm.status().ranks[1].epoch == 2 and llm.status().ranks[1].state not in ("dead", "starting", "restarting"),
        "it is back",
    )
    assert [(rank.state, rank.weight_version) for rank in llm.status().ranks] == [("paused", 7)] * 2
    assert await llm.is_paused()
    await llm.resume_generation()
    async for output in llm.generate("x", params(2), "r", data_parallel_rank=1):
        assert output.stats.weight_version == 7


async def test_new_weights_profiles_and_calls_to_the_runner(start: Start, model: Path, tmp_path: Path) -> None:
    llm = await start(2, engine_settings={"profile_dir": str(tmp_path)})
    assert await llm.update_weights(str(model), 41) == 41
    assert await llm.update_weights(str(model)) == 42
    other = make_tiny_model_dir(tmp_path / "other", vocab_size=77)
    for directory, words in ((other, "do not fit"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(InvalidRequestError, match=words):
            await llm.update_weights(str(directory))
    assert await llm.get_weight_version() == 42
    assert [rank.weight_version for rank in llm.status().ranks] == [42, 42]
    await llm.start_profile()
    for rank in range(2):
        async for output in llm.generate("x", params(2), "r", data_parallel_rank=rank):
            assert output.stats.weight_version == 42
    assert await llm.stop_profile() == [str(tmp_path / f"rank-{rank}-1-1.prof") for rank in range(2)]
    assert all((tmp_path / f"rank-{rank}-1-1.prof").stat().st_size > 0 for rank in range(2))
    assert await llm.collective_rpc("discard_weights") == [None, None]
    with pytest.raises(InvalidRequestError, match=r"rank \d .*has no method 'nonsense'"):
        await llm.collective_rpc("nonsense")

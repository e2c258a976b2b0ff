"""Ranks that say nothing for a while, as on a machine whose cores somebody else has taken."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.integration.llm_harness import FINAL_ONLY, SLOW_MS, Start, collect, params, set_step_ms, until


@pytest.mark.parametrize("silent_s", [3.0, pytest.param(10.0, marks=pytest.mark.long)])
async def test_a_silent_rank_is_suspected_and_not_killed_and_loses_nothing(start: Start, silent_s: float) -> None:
    llm = await start(2, step_ms=1.0)
    prompts = [f"prompt {i}" for i in range(6)]
    whole = [await collect(llm, prompt, params(300, output_kind=FINAL_ONLY)) for prompt in prompts]
    await set_step_ms(llm, SLOW_MS)
    readers = [asyncio.create_task(collect(llm, prompt, params(300, output_kind=FINAL_ONLY), prompt)) for prompt in prompts]
    await until(lambda: all(rank.running == 3 for rank in llm.status().ranks), "all are running")
    pid = llm.status().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: [rank.state for rank in llm.status().ranks] == ["suspect", "ready"], "it is suspected")
        await until(lambda: (llm.status().ranks[0].last_seen_s or 0.0) > silent_s, "it is silent for so long")
        assert {output.rank for _ in range(3) for output in await collect(llm, "new", params(1))} == {1}
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: llm.status().ranks[0].state == "ready", "its next sign of life clears it")
    await set_step_ms(llm, 1.0)
    ends = await asyncio.gather(*readers)
    assert [end.outputs[0].text for (end,) in ends] == [end.outputs[0].text for (end,) in whole]
    assert [(rank.epoch, rank.deaths, rank.requests_moved_away) for rank in llm.status().ranks] == [(1, 0, 0)] * 2

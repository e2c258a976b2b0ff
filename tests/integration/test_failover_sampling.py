"""Sampled requests over the death of their rank, with a seed or one that was drawn for them, with an adapter or without."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cores.messages import EngineCoreRequest
from cores.runner.testing import make_random_lora, make_tiny_llama
from gateway import AsyncLLM
from tests.integration.llm_harness import DEADLINE_S, DELTA, Start, params

NUM_TOKENS = 200  # so many steps of an engine, until the test has seen the first token and killed it
ADAPTER = "sql"
SEED = 5


@dataclass
class Stream:
    """One answer, as it comes."""

    number: int
    fields: dict[str, Any]
    adapter: str | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, llm: AsyncLLM, rank: int, **fields: Any) -> Stream:
        sampling = params(NUM_TOKENS, output_kind=DELTA, **(self.fields | fields))
        prompt, name = f"prompt {self.number}", str(self.number)
        async for output in llm.generate(prompt, sampling, name, lora_request=self.adapter, data_parallel_rank=rank):
            (completion,) = output.outputs
            assert self.reason is None
            self.token_ids += completion.token_ids
            self.text += completion.text
            self.reason = completion.finish_reason
            self.has_begun.set()
        return self


def streams() -> list[Stream]:
    drawn: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.5, "top_k": 40}]
    sampled = [{"temperature": 1.0, "seed": SEED}, *drawn]
    kinds = [(fields, adapter) for fields in sampled for adapter in (None, ADAPTER)]
    return [Stream(number, fields, adapter) for number, (fields, adapter) in enumerate(kinds)]


async def test_sampled_streams_and_those_of_adapters_go_on_as_in_an_undisturbed_run_when_their_rank_is_killed(
    start: Start, tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    make_random_lora(tmp_path / ADAPTER, model, seed=1)
    settings = {"engine": "torch", "model": str(model), "device": "cpu", "dtype": "float32", "num_kv_blocks": 512}
    llm = await start(2, engine_settings=settings | {"enable_lora": True})
    await llm.add_lora(ADAPTER, str(tmp_path / ADAPTER))
    seeds: dict[int, int | None] = {}

    def note_seed(request: EngineCoreRequest, _: str | None) -> None:
        seeds[int(request.request_id.partition("-")[0])] = request.sampling_params.seed

    llm.sender.on_sent = note_seed
    pid = llm.status().ranks[0].pid
    assert pid is not None
    disturbed = streams()
    reading = [asyncio.create_task(stream.read(llm, rank=0)) for stream in disturbed]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(stream.has_begun.wait() for stream in disturbed))
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*reading)
    status = llm.status()
    assert (status.ranks[0].requests_moved_away > 0, status.totals.failed) == (True, 0)
    assert [seeds[stream.number] for stream in disturbed if "seed" in stream.fields] == [SEED, SEED]
    assert len(set(seeds.values())) == len(disturbed) - 1, "each that has none gets one of its own"

    undisturbed = streams()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(stream.read(llm, rank=1, seed=seeds[stream.number]) for stream in undisturbed))
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert (after.token_ids, after.text, after.reason) == (before.token_ids, before.text, before.reason), after.fields
        assert (len(after.token_ids), after.reason) == (NUM_TOKENS, "length")
    assert len({stream.text for stream in disturbed}) == len(disturbed)

"""`POST /v1/responses` of a running server, through OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import openai

from tests.e2e.conftest import ANSWER_TIMEOUT_S, SLOW_MS

FAST_MS = 2
NUM_TOKENS = 300


def question(number: int) -> dict[str, Any]:
    return {
        "model": "tiny", "input": f"stream {number}", "temperature": 0.9, "max_output_tokens": NUM_TOKENS,
        "extra_body": {"ignore_eos": True, "seed": number},
    }  # fmt: skip


async def read(client: openai.AsyncOpenAI, number: int, has_begun: asyncio.Event) -> list[Any]:
    events = []
    async for event in await client.responses.create(**question(number), stream=True):
        events.append(event)
        if event.type == "response.reasoning_text.delta":
            has_begun.set()
    return events


async def test_kill_9_of_a_rank_leaves_every_responses_stream_whole(
    serve: Callable[..., Any], slow_simulated: list[str], poll: Callable[..., Any]
) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--engine-restarts", "0", "--reasoning-parser", "deepseek_r1")
    server.set_step_ms(FAST_MS)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT_S
    ) as client:
        undisturbed = await asyncio.gather(*(client.responses.create(**question(i)) for i in range(6)))
        server.set_step_ms(SLOW_MS)
        begun = [asyncio.Event() for _ in undisturbed]
        streams = [asyncio.create_task(read(client, i, event)) for i, event in enumerate(begun)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), ANSWER_TIMEOUT_S)
        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        await asyncio.to_thread(poll, lambda: server.rank(0)["state"] == "dead", "rank 0 is shown dead")
        server.set_step_ms(FAST_MS)
        ends = await asyncio.gather(*streams)
    assert server.status()["totals"]["moved"] > 0
    for events, whole in zip(ends, undisturbed, strict=True):
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:4]] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        ]  # fmt: skip
        (item,) = whole.output
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == events[-1].response.output[0].content[0].text == item.content[0].text
        assert (events[-1].type, whole.status, item.type) == ("response.incomplete", "incomplete", "reasoning")
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == NUM_TOKENS

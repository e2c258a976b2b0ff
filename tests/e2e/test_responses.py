"""`POST /v1/responses` of a running server, through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from cores.runner.testing import add_random_weights
from cores.testing import make_tiny_model_dir, make_tiny_tokenizer
from tests.e2e.conftest import ANSWER_TIMEOUT_S, SLOW_MS

FAST_MS = 2
NUM_TOKENS = 300
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999, "minimum": -999}},
    "required": ["a"],
    "additionalProperties": False,
}
END_OF_REASONING = make_tiny_tokenizer().get_vocab_size() + 1  # the second of two tokens more
TOOL: Any = {"type": "function", "name": "f", "parameters": SCHEMA}


def question(number: int) -> dict[str, Any]:
    return {
        "model": "tiny", "input": f"stream {number}", "temperature": 0.9, "max_output_tokens": NUM_TOKENS,
        "extra_body": {"ignore_eos": True, "seed": number},
    }  # fmt: skip


def client_of(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT_S)


async def read(client: openai.AsyncOpenAI, body: dict[str, Any], has_begun: asyncio.Event) -> list[Any]:
    events = []
    async for event in await client.responses.create(**body, stream=True):
        events.append(event)
        if event.type == "response.reasoning_text.delta":
            has_begun.set()
    return events


async def test_kill_9_of_a_rank_leaves_every_responses_stream_whole(
    serve: Callable[..., Any], slow_simulated: list[str], poll: Callable[..., Any]
) -> None:
    server = serve(*slow_simulated, "-dp", "2", "--engine-restarts", "0", "--reasoning-parser", "deepseek_r1")
    server.set_step_ms(FAST_MS)
    async with client_of(server) as client:
        undisturbed = await asyncio.gather(*(client.responses.create(**question(i)) for i in range(6)))
        server.set_step_ms(SLOW_MS)
        begun = [asyncio.Event() for _ in undisturbed]
        streams = [asyncio.create_task(read(client, question(i), event)) for i, event in enumerate(begun)]
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


def make_thinking_model(path: Path) -> str:
    """The tiny model with tokens for the markers of reasoning, as models that reason have them."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in ("<think>", "</think>")])
    make_tiny_model_dir(path, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    return str(add_random_weights(path))


def asks(seed: int) -> dict[str, Any]:
    """For an object, or for a call with one as its arguments. The reasoning before it is long or short, by chance."""
    form: Any = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    call: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    return {
        "model": "tiny", "input": f"question {seed}", "temperature": 1.0, "max_output_tokens": 1000,
        "extra_body": {"seed": seed, "logit_bias": {str(END_OF_REASONING): 2.0}}, **(call if seed % 2 else form),
    }  # fmt: skip


def said(response: Any) -> list[tuple[str, str, str]]:
    """(type, status, text) of each item."""
    return [
        (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


@pytest.mark.long
async def test_a_model_reasons_freely_and_answers_in_its_format_also_when_its_rank_is_killed(
    serve: Callable[..., Any], poll: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_thinking_model(tmp_path / "tiny")
    server = serve(
        model, "--device", "cpu", "--dtype", "float32", "--data-parallel-backend", "mp", "-dp", "2", "--engine-restarts", "0",
        "--num-kv-blocks", "1024", "--reasoning-parser", "deepseek_r1",
    )  # fmt: skip
    async with client_of(server) as client:
        undisturbed = await asyncio.gather(*(client.responses.create(**asks(seed)) for seed in range(12)))
        begun = [asyncio.Event() for _ in undisturbed]
        on_rank_0 = {"extra_headers": {"X-data-parallel-rank": "0"}}
        streams = [asyncio.create_task(read(client, asks(seed) | on_rank_0, event)) for seed, event in enumerate(begun)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), ANSWER_TIMEOUT_S)
        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        ends = [events[-1].response for events in await asyncio.gather(*streams)]
    assert server.rank(0)["requests_moved_away"] > 0
    assert [said(response) for response in ends] == [said(response) for response in undisturbed]
    assert [response.usage.output_tokens_details for response in ends] == [
        response.usage.output_tokens_details for response in undisturbed
    ]
    complete = [response for response in undisturbed if response.status == "completed"]
    assert {response.output[-1].type for response in complete} == {"message", "function_call"}
    for response in complete:
        (kind, _, _), (_, _, answer) = said(response)
        assert (kind, list(json.loads(answer))) == ("reasoning", ["a"])
        usage = response.usage
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens

"""The demo model behind two torch engines that Ray launched: what the README promises."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from gateway.models import resolve_model

# float32: a moved request computes its prompt anew in another batch shape, and rounding must not decide between tokens.
ARGUMENTS = [
    "smollm2", "-dp", "2", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--num-kv-blocks", "256",
    "--engine-restarts", "0",
]  # fmt: skip
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    city: Literal["Paris", "London"]


@pytest.fixture(scope="module", autouse=True)
def demo_model() -> str:
    return str(resolve_model("smollm2"))


def test_real_model_on_two_ray_actors_answers_streams_and_goes_on_when_a_rank_dies(
    serve: Callable[..., Any], poll: Callable[..., Any]
) -> None:
    server = serve(*ARGUMENTS)
    assert "mode=DPLBAsyncMPClient  ranks=2" in server.ready_lines[0]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=180, max_retries=0) as client:
        texts = [ask(client, rank, stream) for rank, stream in ((0, True), (1, False))]
        assert all("Paris" in text for text in texts)
        assert len(set(texts)) == 1

        assert fill_in(client, {"city": {"enum": ["Paris", "London"]}, "people": {"type": "integer", "minimum": 1}}) == "Paris"
        with pytest.raises(openai.BadRequestError, match=r"response_format: Invalid type: integerr"):
            fill_in(client, {"city": {"type": "integerr"}})

        response = client.responses.parse(model="smollm2", input=CAPITAL[0]["content"], temperature=0, text_format=Capital)
        assert response.output_parsed == Capital(city="Paris")
        broken: Any = {"type": "json_schema", "name": "x", "schema": {"type": "integerr"}}
        with pytest.raises(openai.BadRequestError, match=r"text\.format: Invalid type: integerr"):
            client.responses.create(model="smollm2", input="Hi", text={"format": broken})
        assert call_a_tool(client, "required") == ("weather", ("Paris", "tool_calls"))
        assert call_a_tool(client, {"type": "function", "function": {"name": "weather"}}) == ("weather", ("Paris", "stop"))

        undisturbed = tell_a_story(client, lambda: None)
        moved = tell_a_story(client, lambda: os.kill(server.rank(0)["pid"], signal.SIGKILL))
        assert moved == undisturbed
        poll(lambda: server.rank(0)["state"] == "dead", "rank 0 is shown dead")
        assert server.rank(0)["death_cause"]
        assert ask(client, None, stream=True) == texts[0]
    assert server.get("/health").status_code == 200


def tell_a_story(client: openai.OpenAI, at_the_third_chunk: Callable[[], None]) -> str:
    """A stream that rank 0 begins."""
    messages = [{"role": "user", "content": "Tell me a story about a fox and a crow."}]
    chunks = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0.8, seed=3, max_tokens=16, stream=True,
        extra_headers={"X-data-parallel-rank": "0"},
    )  # fmt: skip
    text = ""
    for i, chunk in enumerate(chunks):
        if i == 3:
            at_the_third_chunk()
        text += chunk.choices[0].delta.content or ""
    assert text
    return text


def fill_in(client: openai.OpenAI, properties: dict[str, Any]) -> str:
    """The city of a JSON answer that has these fields and no others."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}},
    )  # fmt: skip
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == properties.keys()
    assert answer.choices[0].finish_reason == "stop"
    return value["city"]


def call_a_tool(client: openai.OpenAI, tool_choice: Any) -> tuple[str, tuple[str, str]]:
    """(function, (its city, finish reason)) of the one call that a stream makes."""
    city = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
    chunks = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=60, tools=tools, tool_choice=tool_choice,
        parallel_tool_calls=False, stream=True,
    )  # fmt: skip
    name, arguments, reason = "", "", ""
    for choice in (chunk.choices[0] for chunk in chunks):
        for call in choice.delta.tool_calls or ():
            name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
        reason = choice.finish_reason or reason
    return name, (json.loads(arguments)["city"], reason)


def ask(client: openai.OpenAI, rank: int | None, stream: bool) -> str:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=12, stream=stream, extra_headers=headers
    )
    if not stream:
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content
    chunks = list(answer)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

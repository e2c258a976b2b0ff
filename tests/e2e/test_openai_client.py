"""OpenAI's own Python client against each of the three modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def check_endpoint(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        (model,) = client.models.list().data
        whole = client.chat.completions.create(
            model=model.id, messages=MESSAGES, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
        )
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 24
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24

        chunks = list(
            client.chat.completions.create(
                model=model.id,
                messages=MESSAGES,
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) == {None}
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert chunks[-1].usage.completion_tokens == 24
        check_responses(client, model.id, whole)


def check_responses(client: openai.OpenAI, model: str, chat: Any) -> None:
    """The same answer in the other API's words."""
    question: dict[str, Any] = {
        "model": model, "input": MESSAGES, "temperature": 0, "max_output_tokens": 24, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.responses.create(**question)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)

    events = list(client.responses.create(**question, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage.output_tokens == 24


def test_one_core_and_nothing_but_the_ready_line_is_on_stdout(serve: Callable[..., Any], simulated: list[str]) -> None:
    server = serve(*simulated)
    assert server.ready_lines == [f"gateway ready: {server.url}  mode=AsyncMPClient  ranks=1\n"]
    check_endpoint(server.url)
    assert server.stop() == 0
    assert server.rest_of_stdout() == []
    assert any("rank 0 (epoch 1) is ready" in line for line in server.stderr)


def test_internal_load_balancing(serve: Callable[..., Any], simulated: list[str]) -> None:
    server = serve(*simulated, "-dp", "2")
    assert "mode=DPLBAsyncMPClient  ranks=2" in server.ready_lines[0]
    check_endpoint(server.url)


def test_external_load_balancing_two_endpoints(
    serve: Callable[..., Any], simulated: list[str], poll: Callable[..., Any], port_range: Callable[[int], int]
) -> None:
    external = ["-dp", "2", "--data-parallel-external-lb", "--data-parallel-rpc-port", str(port_range(1))]
    servers = [serve(*simulated, *external, "--data-parallel-rank", rank) for rank in ("0", "1")]
    for rank, server in enumerate(servers):
        assert "mode=DPAsyncMPClient" in server.ready_lines[0]
        check_endpoint(server.url)
        assert [row["rank"] for row in server.status()["ranks"]] == [rank]
        poll(lambda server=server: len(server.status()["group"]) == 2, "the coordinator's view of both ranks")


def test_external_load_balancing_supervised(
    serve: Callable[..., Any], simulated: list[str], port_range: Callable[[int], int]
) -> None:
    port = port_range(2)
    arguments = ["-dp", "2", "--data-parallel-multi-port-external-lb", "--data-parallel-rpc-port", str(port_range(1))]
    server = serve(*simulated, *arguments, "--port", str(port), ready_lines=2)
    assert server.urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
    for url in server.urls:
        check_endpoint(url)


def test_pinned_rank_is_honoured_and_an_impossible_one_is_a_400(serve: Callable[..., Any], simulated: list[str]) -> None:
    server = serve(*simulated, "-dp", "2")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(4):
            answer = client.chat.completions.with_raw_response.create(
                model="tiny", messages=MESSAGES, max_tokens=2, extra_headers={"X-data-parallel-rank": "1"}
            )
            assert answer.headers["X-Gateway-Rank"] == "1"
        for rank in ("2", "-1"):
            with pytest.raises(openai.BadRequestError, match=f"X-data-parallel-rank: rank {rank} .* are 0 to 1") as refusal:
                client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=2, extra_headers={"X-data-parallel-rank": rank}
                )
            assert refusal.value.param == "X-data-parallel-rank"
    assert server.rank(0)["requests_total"] == 0

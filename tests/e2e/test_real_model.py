"""The demo model behind two torch engines that Ray launched: what the README promises."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import openai
import pytest

from gateway.models import resolve_model

ARGUMENTS = [
    "smollm2", "-dp", "2", "--max-model-len", "512", "--max-num-seqs", "8", "--num-kv-blocks", "256", "--engine-restarts", "0",
]  # fmt: skip
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module", autouse=True)
def demo_model() -> str:
    return str(resolve_model("smollm2"))


def test_real_model_on_two_ray_actors_answers_streams_and_outlives_a_dead_rank(
    serve: Callable[..., Any], poll: Callable[..., Any]
) -> None:
    server = serve(*ARGUMENTS)
    assert "mode=DPLBAsyncMPClient  ranks=2" in server.ready_lines[0]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        texts = [ask(client, rank, stream) for rank in (0, 1) for stream in (False, True)]
        assert all("Paris" in text for text in texts)
        assert len(set(texts)) == 1

        os.kill(server.rank(0)["pid"], signal.SIGKILL)
        poll(lambda: server.rank(0)["state"] == "dead", "rank 0 is shown dead", 20)
        assert server.rank(0)["death_cause"]
        assert ask(client, None, stream=True) == texts[0]
    assert server.get("/health").status_code == 200


def ask(client: openai.OpenAI, rank: int | None, stream: bool) -> str:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=24, stream=stream, extra_headers=headers
    )
    if not stream:
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content
    chunks = list(answer)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

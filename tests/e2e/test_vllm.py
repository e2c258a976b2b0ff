"""Two ranks that host the real vLLM, on a CPU: they answer as `vllm serve` does, and one of them is killed.

`GATEWAY_PEER_PYTHON=…/bin/python ./scripts/test --peer tests/e2e/test_vllm.py`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from gateway.models import resolve_model
from tests.e2e.conftest import ROOT, START_TIMEOUT_S, Server, wait_for

pytestmark = pytest.mark.peer

# float32: another batch shape rounds differently, and that must not decide between tokens.
SETTINGS = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16"]
ARGUMENTS = [
    *SETTINGS, "--engine", "vllm", "--data-parallel-backend", "mp", "-dp", "2", "--kv-cache-memory-bytes", "300000000",
    "--vllm-args", "enforce_eager=true", "--dev-mode",
]  # fmt: skip
TIMEOUT_S = 120.0
PROMPTS = ["The capital of France is", "Once upon a time there was a", "def add(a, b):", "The three largest planets are"]
STORY = {"prompt": "Once upon a time there was a fox who", "temperature": 0, "max_tokens": 120, "ignore_eos": True}


@pytest.fixture(scope="module")
def python() -> str:
    python = os.environ.get("GATEWAY_PEER_PYTHON", "")
    if not Path(python).is_file():
        pytest.fail("--peer needs GATEWAY_PEER_PYTHON: a Python that has vLLM and what this package needs")
    return python


@pytest.fixture(scope="module")
def model() -> str:
    return str(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def server(python: str, model: str) -> Iterator[Server]:
    server = Server(model, *ARGUMENTS, "--served-model-name", "smollm2", python=python)
    yield server
    assert server.stop() == 0


def complete(url: str, **body: Any) -> dict[str, Any]:
    answer = requests.post(f"{url}/v1/completions", json={"model": "smollm2", **body}, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(url: str, **body: Any) -> str:
    return complete(url, **body)["choices"][0]["text"]


def streamed(url: str, on_chunk: Callable[[int], None], rank: int, **body: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens; `on_chunk` is told the number of each chunk with text."""
    body = {"model": "smollm2", "stream": True, "stream_options": {"include_usage": True}, **body}
    headers = {"X-data-parallel-rank": str(rank)}
    text, reason, num_tokens, num_chunks = "", "", 0, 0
    with requests.post(f"{url}/v1/completions", json=body, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
        for line in answer.iter_lines():
            data = line.decode().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                if choice["text"]:
                    num_chunks += 1
                    on_chunk(num_chunks)
    return text, reason, num_tokens


def ignore(_: int) -> None:
    pass


def test_a_chat_is_answered_and_counted(server: Server) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = requests.post(f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 20}, timeout=TIMEOUT_S).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] > 3
    num_tokens = answer["usage"]["completion_tokens"]
    wait_for(lambda: num_generated(server) >= num_tokens, "heartbeats have told of the tokens")
    assert 'gateway:generation_tokens_total{engine="0",model_name="smollm2"}' in server.get("/metrics").text


def num_generated(server: Server) -> int:
    return sum(row["generation_tokens"] for row in server.status()["ranks"])


def test_greedy_answers_are_those_of_vllm_serve(
    server: Server, python: str, model: str, port_range: Callable[[int], int], tmp_path: Path
) -> None:
    port = port_range(1)
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "smollm2", *SETTINGS,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--kv-cache-memory-bytes", "300000000",
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        peer = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"VLLM_HOST_IP": "127.0.0.1"}, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: is_healthy(url) or peer.poll() is not None, "vllm serve", START_TIMEOUT_S)
            assert peer.poll() is None, (tmp_path / "log").read_text()[-3000:]
            theirs = [text(url, prompt=prompt, temperature=0, max_tokens=40) for prompt in PROMPTS]
        finally:
            peer.terminate()
            peer.wait(TIMEOUT_S)
    assert [text(server.url, prompt=prompt, temperature=0, max_tokens=40) for prompt in PROMPTS] == theirs


def is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def test_a_seed_gives_the_same_text_again_on_both_ranks(server: Server) -> None:
    body = {"prompt": "My favourite food is", "temperature": 1.0, "seed": 5, "max_tokens": 20}
    texts = {streamed(server.url, ignore, rank, **body)[0] for rank in (0, 1, 0)}
    assert len(texts) == 1
    assert streamed(server.url, ignore, 0, **{**body, "seed": 6})[0] not in texts


def test_a_schema_logprobs_stop_strings_and_prompt_logprobs_are_served(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "London"]}, "people": {"type": "integer", "maximum": 99}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    body = {"prompt": "The capital of France as JSON: ", "temperature": 0, "max_tokens": 60}
    assert json.loads(text(server.url, **body, structured_outputs={"json": schema}))["city"] in ("Paris", "London")

    choice = complete(server.url, prompt=PROMPTS[0], temperature=0, max_tokens=4, logprobs=2)["choices"][0]
    assert choice["logprobs"]["tokens"][0] == " Paris"
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2
    choice = complete(server.url, prompt=PROMPTS[0], temperature=0, max_tokens=20, stop=["."], prompt_logprobs=1)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" Paris", "stop", ".")
    assert [entry is None for entry in choice["prompt_logprobs"]] == [True, False, False, False, False]


def test_a_prefix_is_found_in_the_cache_and_reset_at_the_operators_word(server: Server) -> None:
    prompt = "Tell me of the sea. " * 60
    usages = [complete(server.url, prompt=prompt, temperature=0, max_tokens=1)["usage"] for _ in range(4)]
    assert max(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) >= 256
    assert requests.post(f"{server.url}/reset_prefix_cache", timeout=TIMEOUT_S).status_code == 200
    again = complete(server.url, prompt=prompt, temperature=0, max_tokens=1)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 0


def test_prompts_go_where_vllm_has_their_prefix(server: Server) -> None:
    prompts = [f"Story {i}. " + "The sea was calm. " * 80 for i in range(2)]
    usages = []
    for rank, prompt in enumerate(prompts):  # each rank gets its own, whatever the policy would say
        streamed(server.url, ignore, rank, prompt=prompt, temperature=0, max_tokens=1)
    for prompt in prompts * 2:
        usages.append(complete(server.url, prompt=prompt, temperature=0, max_tokens=1)["usage"])
    assert [usage["prompt_tokens_details"]["cached_tokens"] >= 256 for usage in usages] == [True] * 4


def test_a_client_that_leaves_ends_its_request_in_vllm(server: Server) -> None:
    body = {**STORY, "model": "smollm2", "stream": True, "max_tokens": 900}
    answer = requests.post(f"{server.url}/v1/completions", json=body, stream=True, timeout=TIMEOUT_S)
    next(answer.iter_lines())
    assert sum(row["running"] for row in server.status()["ranks"]) == 1
    answer.close()
    wait_for(server.is_idle, "no request is left")
    assert num_generated(server) < 900
    assert server.status()["totals"]["aborted"] == 1


def test_what_vllm_does_not_serve_is_refused_in_words(server: Server) -> None:
    answer = requests.post(f"{server.url}/v1/embeddings", json={"model": "smollm2", "input": "a"}, timeout=TIMEOUT_S)
    assert (answer.status_code, "makes no embeddings" in answer.text) == (400, True)
    answer = requests.post(f"{server.url}/sleep", timeout=TIMEOUT_S)
    assert (answer.status_code, "vLLM does not sleep on a CPU" in answer.text) == (400, True)
    answer = requests.post(f"{server.url}/update_weights", json={"directory": "/tmp"}, timeout=TIMEOUT_S)
    assert (answer.status_code, "takes no new weights" in answer.text) == (400, True)
    assert server.get("/health").status_code == 200


def test_what_is_kept_over_a_pause_goes_on(server: Server) -> None:
    undisturbed = streamed(server.url, ignore, 0, **STORY)

    def pause_and_resume(num_chunks: int) -> None:
        if num_chunks == 5:
            for order in ("pause?mode=keep", "resume"):
                answer = requests.post(f"{server.url}/{order}", timeout=TIMEOUT_S)
                assert answer.status_code == 200, answer.text

    assert streamed(server.url, pause_and_resume, 0, **STORY) == undisturbed
    assert server.rank(0)["preemptions"] == 1


def test_streams_of_a_rank_that_is_killed_go_on_at_the_other_from_their_last_token(server: Server) -> None:
    words = {"structured_outputs": {"regex": "([a-z]{3} ){30}[a-z]{3}"}, "ignore_eos": False}
    bodies = [STORY, STORY | words]
    undisturbed = [streamed(server.url, ignore, 0, **body) for body in bodies]
    moved = []
    for body in bodies:
        wait_for(lambda: server.rank(0)["state"] == "ready", "rank 0 is back", START_TIMEOUT_S)
        pid = server.rank(0)["pid"]

        def kill(num_chunks: int, pid: int = pid) -> None:
            if num_chunks == 5:
                os.kill(pid, signal.SIGKILL)

        moved.append(streamed(server.url, kill, 0, **body))
    assert moved == undisturbed
    assert server.rank(0)["requests_moved_away"] == 2
    assert server.status()["totals"]["failed"] == 0

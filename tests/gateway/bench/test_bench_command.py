"""`gateway bench` against real endpoints."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import bench as command
from gateway.errors import EngineDeadError, OverloadedError
from gateway.testing import FakeRequest

DEADLINE_S = 60.0


def speaks(request: FakeRequest) -> None:
    """As many tokens as asked for, one output each."""
    request.rank = request.prompt_token_ids[0] % 2
    limit = request.params.max_tokens or 0
    for i in range(limit):
        request.put("x", finish_reason="length" if i == limit - 1 else None)


async def run_command(*words: str) -> int:
    """In a thread, as the server of the test has this loop."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *words])
    return await asyncio.wait_for(asyncio.to_thread(args.run, args), DEADLINE_S)


@pytest.mark.parametrize("how", [("--concurrency", "4"), ("--rate", "500")])
@pytest.mark.parametrize("chat", [(), ("--chat",)])
async def test_every_planned_token_is_asked_for_and_counted(
    serve: Any, capsys: pytest.CaptureFixture[str], how: tuple[str, ...], chat: tuple[str, ...]
) -> None:
    served = await serve(speaks)
    words = ("--url", served.url, "--input-len", "32", "--output-len", "8", "--num-prompts", "20", "--json", *how, *chat)
    assert await run_command(*words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["completed"], summary["errors"]) == (20, 0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (20 * 32, 20 * 8)
    assert summary["ttft_ms"]["p50"] > 0
    assert set(summary["e2e_ms"]) == {"mean", "p50", "p90", "p99"}
    assert sum(summary["requests_by_rank"].values()) == 20
    template = len("<user><assistant>") if chat else 0
    assert {len(request.prompt_token_ids) for request in served.engine.requests} == {32 + template}
    assert all(request.params.ignore_eos for request in served.engine.requests)


async def test_a_closed_loop_never_has_more_under_way(serve: Any) -> None:
    most = 0

    def script(request: FakeRequest) -> None:
        nonlocal most
        most = max(most, served.engine.status().front_ends[0].in_flight)
        speaks(request)

    served = await serve(script)
    assert await run_command("--url", served.url, "--concurrency", "3", "--num-prompts", "30", "--output-len", "4") == 0
    assert most <= 3


async def test_a_trace_is_replayed_with_its_lengths_and_shared_prefixes(serve: Any, tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 600, "output_length": n, "hash_ids": [7, n]} for n in (3, 4)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    served = await serve(speaks)
    assert await run_command("--url", served.url, "--dataset", str(tmp_path / "t.jsonl")) == 0
    one, other = served.engine.requests
    assert len(one.prompt_token_ids) == 600
    assert one.prompt_token_ids[:512] == other.prompt_token_ids[:512]
    assert sorted(request.params.max_tokens for request in (one, other)) == [3, 4]


@pytest.mark.parametrize(("words", "arrivals_s"), [((), [0.0, 1.5, 3.0, 4.5]), (("--bursts",), [0.0, 0.0, 3.0, 3.0])])
def test_stamps_in_buckets_are_spread_as_in_the_simulator_unless_bursts_are_wanted(
    tmp_path: Path, words: tuple[str, ...], arrivals_s: list[float]
) -> None:
    rows = [{"timestamp": stamp, "input_length": 5, "output_length": 1} for stamp in (0, 0, 3000, 3000)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", "--dataset", str(tmp_path / "t.jsonl"), *words])
    assert [request.at_s for request in command.plan(args, command.read_trace(args), [1, 2])] == arrivals_s


async def test_failed_requests_are_counted_by_reason(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: FakeRequest) -> None:
        number = len(served.engine.requests)
        if number % 3 == 0:
            request.fail(OverloadedError("the server is full"))
        elif number % 3 == 1:
            request.put("x")
            request.fail(EngineDeadError("rank 0 died"))
        else:
            speaks(request)

    served = await serve(script)
    words = ("--url", served.url, "--concurrency", "1", "--num-prompts", "9", "--output-len", "4")
    assert await run_command(*words, "--json") == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["completed"], summary["errors"]) == (3, 6)
    assert summary["error_messages"] == {"503: the server is full": 3, "in the stream: rank 0 died": 3}
    assert await run_command(*words) == 1
    assert "3 × 503: the server is full" in capsys.readouterr().out


async def test_ctrl_c_says_that_it_was_interrupted_and_of_how_many_requests(serve: Any) -> None:
    under_way = asyncio.Event()

    def script(request: FakeRequest) -> None:
        if len(served.engine.requests) > 2:
            under_way.set()  # and no answer
        else:
            speaks(request)

    served = await serve(script)
    words = ("--url", served.url, "--concurrency", "1", "--num-prompts", "500", "--output-len", "4")
    pipe = asyncio.subprocess.PIPE
    # Whoever runs the tests in the background ignores SIGINT, and so would the program.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{heed}; import sys; from gateway.cli import main; sys.exit(main())"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", start, "bench", *words, stdout=pipe, stderr=pipe)
    try:
        await asyncio.wait_for(under_way.wait(), DEADLINE_S)
        program.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(program.communicate(), DEADLINE_S)
    finally:
        if program.returncode is None:
            program.kill()
            await program.communicate()
    assert (program.returncode, err) == (130, b"")
    first = out.decode().splitlines()[0]
    assert first.startswith("2 of 500 requests completed in ")
    assert first.endswith(" s, interrupted")


@pytest.mark.parametrize("words", [(), ("--model", "fake")])
async def test_an_embedding_model_is_refused_before_the_load(
    serve: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    served = await serve(speaks)
    served.engine.embeds(4)
    assert await run_command("--url", served.url, "--concurrency", "1", *words) == 2
    assert "model 'fake' makes embeddings and generates no text" in capsys.readouterr().err
    assert served.engine.requests == []


async def test_an_endpoint_that_cannot_be_used_is_one_line_and_exit_code_two(
    serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    served = await serve(speaks, api_key=("secret",))
    for words in [
        ("--url", served.url, "--concurrency", "1"),
        ("--url", "http://127.0.0.1:1", "--concurrency", "1"),
        ("--url", served.url, "--api-key", "secret", "--model", "gpt-9", "--concurrency", "1"),
        ("--url", served.url),
        ("--dataset", "/none.jsonl", "--input-len", "3"),
        ("--dataset", "/none.jsonl"),
    ]:
        assert await run_command(*words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gateway bench: ")
        assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [("--concurrency", "0"), ("--rate", "-1"), ("--rate", "x"), ("--rate", "1", "--concurrency", "1"), ("--input-len", "1.5")],
)
async def test_bad_flags_are_usage_errors(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await run_command(*words)
    assert "bench" in capsys.readouterr().err

"""`gateway status` against real endpoints."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from gateway.cli import status as command
from gateway.dashboard.board import Board
from gateway.dashboard.feed import REFUSED_S, WRONG_KEY, StatusFeed, exit_code, parse
from gateway.dashboard.live import follow
from gateway.status import RankStatus

DEADLINE_S = 60.0


def free_url() -> str:
    """Where nobody listens: the port was ours a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


async def run_command(*words: str) -> int:
    """In a thread, as the server of the test has this loop."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["status", *words])
    return await asyncio.wait_for(asyncio.to_thread(args.run, args), DEADLINE_S)


async def test_json_is_the_document_and_the_exit_code_tells_health(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served = await serve()
    url, engine = served.url, served.engine
    for state, ranks, code in [
        ("ready", ("ready", "ready"), 0),
        ("degraded", ("ready", "dead"), 1),
        ("degraded", ("ready", "suspect"), 1),
        ("draining", ("ready",), 1),
        ("dead", ("dead",), 2),
    ]:
        engine.state = state
        engine.ranks = tuple(RankStatus(rank=i, epoch=1, state=rank) for i, rank in enumerate(ranks))
        assert await run_command("--url", url, "--json") == code
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(engine.status().to_document()))


async def test_an_unreachable_endpoint_is_exit_code_two_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    url = free_url()
    assert await run_command("--url", url, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert url in captured.err
    assert await run_command("--url", url, "--once") == 2
    assert "unreachable" in capsys.readouterr().out


async def test_several_endpoints_are_one_frame_and_one_list(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (await serve()).url, (await serve()).url
    assert await run_command("--url", first, "--url", second, "--once") == 0
    out = capsys.readouterr().out
    assert "0/0" in out
    assert "1/0" in out
    assert await run_command("--url", first, "--url", free_url(), "--json") == 2
    documents = json.loads(capsys.readouterr().out)
    assert documents[0]["model"] == "fake"
    assert set(documents[1]) == {"url", "error"}


async def test_the_key_comes_from_the_flag_or_the_environment(
    serve: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (await serve(api_key=("secret",))).url
    assert await run_command("--url", url, "--once") == 2
    assert "--api-key" in capsys.readouterr().out
    assert await run_command("--url", url, "--once", "--api-key", "secret") == 0
    monkeypatch.setenv("GATEWAY_API_KEY", "secret")
    assert await run_command("--url", url, "--once") == 0


async def test_an_endpoint_that_refuses_the_key_is_not_asked_twice_a_second() -> None:
    num_asked, status, now = 0, 401, 0.0

    async def answer(_request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        return web.json_response({"state": "ready"}, status=status)

    app = web.Application()
    app.router.add_get("/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with StatusFeed([f"http://127.0.0.1:{runner.addresses[0][1]}"], clock=lambda: now) as feed:
        for _ in range(20):
            assert (await feed.read(0)).error == WRONG_KEY
            now += 0.49
        assert num_asked == 1
        status, now = 200, REFUSED_S  # it was started with our key
        assert [(await feed.read(0)).error for _ in range(3)] == [None] * 3
        assert num_asked == 4
    await runner.cleanup()


async def test_a_pipe_gets_frame_after_frame_and_what_it_is_that_cannot_be_reached(serve: Any) -> None:
    served = await serve()
    console = Console(file=StringIO(), width=100)
    async with StatusFeed([served.url, free_url()]) as feed:
        board = Board(feed.urls)
        following = asyncio.ensure_future(follow(console, feed, 0.01, board, ascii_only=False))
        await until(lambda: board.endpoints[0].status is not None)
        served.engine.state = "draining"
        await until(lambda: any(status.state == "draining" for status in board.statuses))
        assert board.endpoints[1].error is not None
        served.engine.state = "ready"
        await until(lambda: any(status.state == "ready" for status in board.statuses))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert " draining " in text
    assert "unreachable" in text
    assert "\x1b" not in text


async def until(condition: Callable[[], bool]) -> None:
    """Of states that stay."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # frames come when they come: there is no event
            await asyncio.sleep(0.005)


async def test_what_answers_but_is_no_gateway_is_an_error_not_a_crash() -> None:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>")

    app = web.Application()
    app.router.add_get("/status", page)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with StatusFeed([url, url + "/elsewhere"]) as feed:
        html, missing = await feed.read_all()
    assert "is no gateway" in (html.error or "")
    assert missing.error == "answered 404 Not Found"
    await runner.cleanup()


async def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with StatusFeed([f"http://127.0.0.1:{listener.getsockname()[1]}"], timeout_s=0.05) as feed:
            (reading,) = await feed.read_all()
    assert reading.error == "no answer within 0.05 s"


def test_documents_of_other_versions_are_read() -> None:
    rank = {"rank": 0, "epoch": 1, "state": "ready", "novel": True}
    document = {"version": "9", "mode": "m", "model": "x", "uptime_s": 1, "state": "ready", "new_field": 1, "ranks": [rank]}
    reading = parse("http://h", json.dumps(document).encode())
    assert reading.status is not None
    assert reading.document is not None
    assert reading.status.ranks[0].state == "ready"
    assert reading.document["new_field"] == 1
    assert exit_code([reading]) == 0


def test_what_a_server_of_another_version_leaves_out_or_says_otherwise_costs_that_field_only() -> None:
    old = {"state": "ready", "ranks": [{"rank": 0, "state": "ready", "waiting": "3", "running": [], "kv_cache_usage": 1}]}
    reading = parse(
        "http://h", json.dumps(old | {"totals": {"requests": 5, "failed": None}, "events": [{"seq": "x"}]}).encode()
    )
    status = reading.status
    assert status is not None
    assert (status.version, status.uptime_s, status.front_ends) == ("", 0.0, ())
    (rank,) = status.ranks
    assert (rank.rank, rank.epoch, rank.waiting, rank.running, rank.kv_cache_usage) == (0, 0, 3, 0, 1.0)
    assert (status.totals.requests, status.totals.failed) == (5, 0)
    assert status.events[0].kind == ""
    assert exit_code([reading]) == 0


@pytest.mark.parametrize("body", ["[]", '{"ranks": []}', '{"state": 1}', '"ready"', "nothing", ""])
def test_other_documents_are_no_status(body: str) -> None:
    assert "is no gateway" in (parse("http://h", body.encode()).error or "")


def test_nothing_read_is_not_well() -> None:
    assert StatusFeed(["http://h"]).exit_code == 2


@pytest.mark.parametrize("mode", ["--json", "--once"])
def test_a_reader_that_has_seen_enough_is_no_error(mode: str) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    command_line = [
        sys.executable,
        "-m",
        "gateway",
        "status",
        mode,
        "--url",
        "http://127.0.0.1:9",
        "--url",
        "http://127.0.0.1:9",
    ]
    with os.fdopen(writing_end, "w") as nobody:
        done = subprocess.run(command_line, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2  # unreachable, as it would have said
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("h:80", "http://h:80"),
        ("https://h/", "https://h"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
        ("http://h:8000/v1", "http://h:8000"),  # as it stands in OPENAI_BASE_URL
        ("https://h/llm/v1/", "https://h/llm"),
        ("http://v1/", "http://v1"),
        ("unix:/run/v1", "unix:/run/v1"),
    ],
)
def test_urls_may_leave_out_the_scheme_and_be_those_of_openais_clients(text: str, url: str) -> None:
    assert command.base_url(text) == url


@pytest.mark.parametrize("bad", ["", "ftp://h", "http://", "http://h:port", "http://h:99999", "unix:", "unix:///"])
def test_bad_urls_are_usage_errors(bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        command.base_url(bad)


@pytest.mark.parametrize("bad", ["0", "-1", "x", "nan", "1e9"])
def test_bad_intervals_are_usage_errors(bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        command.interval(bad)

"""The subcommands that talk to an endpoint, however it listens: with a Unix socket, and below a path of a proxy."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession, web
from aiohttp.client_reqrep import ConnectionKey

from gateway.cli import bench, ranks, status
from gateway.endpoint_url import reason, socket_path
from gateway.status import RankStatus
from gateway.testing import FakeRequest

DEADLINE_S = 60.0


async def run_command(*words: str) -> int:
    """In a thread, as the server of the test has this loop."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for command in (bench, ranks, status):
        command.add_parser(subparsers)
    args = parser.parse_args(words)
    return await asyncio.wait_for(asyncio.to_thread(args.run, args), DEADLINE_S)


def speaks(request: FakeRequest) -> None:
    for i in range(request.params.max_tokens or 0):
        request.put("x", finish_reason="length" if i + 1 == request.params.max_tokens else None)


async def test_the_line_that_serve_prints_for_a_unix_socket_is_a_url(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = await serve(speaks, uds=str(tmp_path / "s"))
    assert served.url == f"unix:{tmp_path}/s"
    assert await run_command("status", "--once", "--url", served.url) == 0
    assert " ready " in capsys.readouterr().out
    assert await run_command("status", "--json", "--url", f"unix://{tmp_path}/s") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "fake"
    assert await run_command("ranks", "drain", "all", "--url", served.url) == 0
    assert served.engine.orders == [("drain", {"rank": 0})]
    load = ("--concurrency", "2", "--num-prompts", "4", "--output-len", "3", "--json")
    assert await run_command("bench", "--url", served.url, *load) == 0
    assert '"completed": 4' in capsys.readouterr().out


async def test_a_unix_socket_that_is_not_there_is_unreachable_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"unix:{tmp_path}/nobody"
    assert await run_command("status", "--json", "--url", url) == 2
    assert f"{url}: No such file or directory" in capsys.readouterr().err
    assert await run_command("ranks", "restart", "0", "--url", url) == 1
    order = f"{url}/admin/ranks/0/restart"
    assert capsys.readouterr().err == f"gateway ranks restart: {order}: No such file or directory\n"
    assert await run_command("bench", "--url", url, "--concurrency", "1") == 2
    assert url in capsys.readouterr().err


LOAD = ("--concurrency", "1", "--num-prompts", "1")


@pytest.mark.parametrize("words", [("status", "--json"), ("ranks", "drain", "0"), ("bench", *LOAD)])
async def test_an_endpoint_that_cannot_be_reached_is_told_in_plain_words(
    serve: Any, certificate: dict[str, str], capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    over_tls, plain = await serve(**certificate), await serve()
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        for url, told in (
            (f"http://127.0.0.1:{bound.getsockname()[1]}", "Connection refused"),
            (
                f"https://127.0.0.1:{over_tls.port}",
                "signed certificate; set SSL_CERT_FILE",
            ),
            (f"http://127.0.0.1:{over_tls.port}", "hung up without an answer; perhaps it speaks TLS: https://"),
            (f"https://127.0.0.1:{plain.port}", "perhaps it speaks none: http://"),
        ):
            assert await run_command(*words, "--url", url) in (1, 2)
            (line,) = capsys.readouterr().err.splitlines()
            assert url in line
            assert line.endswith(told)


def test_what_a_file_of_certificates_does_not_cure_has_no_hint_at_one() -> None:
    class OfAnotherHost(ssl.SSLCertVerificationError):
        verify_code, verify_message = 62, "Hostname mismatch, certificate is not valid for 'h'."

    key = ConnectionKey("h", 443, True, True, None, None, None)
    error = aiohttp.ClientConnectorCertificateError(key, OfAnotherHost(1, "[SSL] certificate verify failed"))
    assert reason(error, "https://h") == "its certificate is not trusted: Hostname mismatch, certificate is not valid for 'h'"


def test_a_name_that_nobody_knows_is_told_in_the_resolvers_words() -> None:
    key = ConnectionKey("h", 80, False, True, None, None, None)
    error = aiohttp.ClientConnectorDNSError(key, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert reason(error, "http://h") == "Name or service not known"


async def test_orders_reach_an_endpoint_below_a_path(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served = await serve()

    async def pass_on(request: web.Request) -> web.Response:
        target = served.url + request.path.removeprefix("/llm")
        async with ClientSession() as session, session.request(request.method, target, data=await request.read()) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/llm/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    assert await run_command("ranks", "drain", "all", "--url", f"http://127.0.0.1:{port}/llm/") == 0
    assert capsys.readouterr().out == "rank 0: ready, epoch 1, no requests left there\n"
    assert served.engine.orders == [("drain", {"rank": 0})]
    await runner.cleanup()


def show(served: Any, *looks: tuple[RankStatus, ...]) -> None:
    """Each look at the ranks sees the next of these, and the last one for ever."""
    left, status = list(looks), partial(type(served.engine).status, served.engine)

    def look() -> Any:
        served.engine.ranks = left.pop(0) if len(left) > 1 else left[0]
        return status()

    served.engine.status = look


def rank_row(rank: int = 0, state: str = "draining", **numbers: int) -> RankStatus:
    return RankStatus(rank=rank, epoch=1, state=state, **numbers)


async def test_a_drain_says_how_many_requests_the_rank_still_has_and_waits_for_the_last_if_told_to(
    serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    served, other = await serve(), rank_row(1, "ready", running=5)
    busy, booked, empty = rank_row(running=2, waiting=1, ledger_requests=2), rank_row(ledger_requests=1), rank_row()
    show(served, *[(busy, other)] * 4, (booked, other), (empty, other))
    assert await run_command("ranks", "drain", "0", "--wait", "--url", served.url) == 0
    said = "rank 0: draining, epoch 1, 3 requests left there\nnothing runs or waits there any more\n"
    assert capsys.readouterr() == (said, "")
    assert served.engine.ranks == (empty, other)
    assert await run_command("ranks", "drain", "0", "--url", served.url) == 0
    assert capsys.readouterr() == ("rank 0: draining, epoch 1, no requests left there\n", "")


async def test_a_drain_that_takes_too_long_or_is_undone_is_no_success(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served, other = await serve(), rank_row(1, "ready")
    show(served, (rank_row(running=2), other))
    assert await run_command("ranks", "drain", "0", "--timeout", "0", "--url", served.url) == 1
    assert capsys.readouterr().err == "gateway ranks drain: 2 requests left there after 0 s; the ranks stay drained\n"
    show(served, *[(rank_row(running=2), other)] * 6, (rank_row(state="ready", running=2), other))
    assert await run_command("ranks", "drain", "0", "--wait", "--url", served.url) == 1
    assert "rank 0 takes requests again" in capsys.readouterr().err


async def test_draining_the_last_ready_rank_is_no_outage_without_a_word(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served = await serve()
    show(served, (rank_row(0), rank_row(1), rank_row(2, "dead")))
    assert await run_command("ranks", "drain", "0", "1", "--url", served.url) == 0
    warning = "gateway ranks drain: no ready rank is left: new requests get 503 until `gateway ranks undrain 0 1`\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize("size", ["0", "-1", "1025", "two", "\u0663"])
async def test_a_number_of_ranks_that_cannot_be_is_answered_with_the_range(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        await run_command("ranks", "scale", f"{size}")
    assert f"the number of ranks must be from 1 to 1024, got '{size}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("unix:/run/a", "/run/a"),
        ("unix:///run/a", "/run/a"),
        ("unix:a.sock", "a.sock"),
        ("http://unix:80", None),
    ],
)
def test_the_path_of_a_unix_socket(url: str, path: str | None) -> None:
    assert socket_path(url) == path

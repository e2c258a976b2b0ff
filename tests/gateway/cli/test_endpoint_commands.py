"""The subcommands that talk to an endpoint, however it listens: with a Unix socket, and below a path of a proxy."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession, web
from aiohttp.client_reqrep import ConnectionKey

from gateway.cli import bench, ranks, status
from gateway.endpoint_url import reason, socket_path
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
    assert capsys.readouterr().out == "rank 0: ready, epoch 1\n"
    assert served.engine.orders == [("drain", {"rank": 0})]
    await runner.cleanup()


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

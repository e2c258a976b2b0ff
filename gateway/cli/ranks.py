"""`gateway ranks`: what an operator does to the ranks of a running endpoint, over its HTTP routes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp

from gateway.cli.status import DEFAULT_URL, URL_FORMS, base_url
from gateway.endpoint_url import http_base, make_connector, reason
from gateway.exit_codes import EXIT_FAILED
from gateway.operations import DRAIN_TIMEOUT_S

TIMEOUT_MARGIN_S = 900.0  # to start engines with large weights


class OrderFailed(Exception):
    """The endpoint did not do it, or could not be reached. One line."""


def add_parser(subparsers: Any) -> None:
    text = "drain, undrain or restart ranks of a running endpoint, or change their number"
    parser = subparsers.add_parser("ranks", help=text, description=text)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, text in (
        ("drain", "no new requests for these ranks; those that they have go on"),
        ("undrain", "new requests again"),
        ("restart", "drain, end and start again, one rank after the other; no request is lost"),
    ):
        command = actions.add_parser(action, help=text, description=text)
        command.add_argument("rank", nargs="+", help="rank number, or `all`")
        _add_common(command, has_timeout=action == "restart")
    text = "another number of ranks while serving"
    scale = actions.add_parser("scale", help=text, description=text)
    scale.add_argument("size", type=int, help="how many ranks there shall be")
    _add_common(scale, has_timeout=True)
    parser.set_defaults(run=run)


def _add_common(parser: Any, *, has_timeout: bool) -> None:
    if has_timeout:
        parser.add_argument(
            "--drain-timeout", type=float, default=DRAIN_TIMEOUT_S, metavar="S",
            help=f"seconds that a rank's requests get before they go on elsewhere (default: {DRAIN_TIMEOUT_S:g})",
        )  # fmt: skip
    parser.add_argument(
        "--url", type=base_url, default=DEFAULT_URL, metavar="URL", help=f"endpoint, {URL_FORMS} (default: {DEFAULT_URL})"
    )
    parser.add_argument("--api-key", metavar="KEY", help="bearer token of the endpoint (default: GATEWAY_API_KEY)")


def run(args: argparse.Namespace) -> int:
    try:
        asyncio.run(_run(args))
    except OrderFailed as error:
        print(f"gateway ranks {args.action}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


async def _run(args: argparse.Namespace) -> None:
    key = args.api_key or os.environ.get("GATEWAY_API_KEY")
    timeout = aiohttp.ClientTimeout(total=getattr(args, "drain_timeout", 0.0) + TIMEOUT_MARGIN_S, sock_connect=5.0)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(connector=make_connector(args.url), headers=headers, timeout=timeout) as session:
        await _carry_out(args, _Endpoint(args.url, session))


class _Endpoint:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer. Raises `OrderFailed`."""
        try:
            async with self._session.request(method, http_base(self._url) + path, json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OrderFailed(f"{self._url}{path}: {reason(error, self._url)}") from error
        if response.status != 200:
            raise OrderFailed(answer["error"]["message"] if "error" in answer else f"{path}: {response.status}")
        return answer


async def _carry_out(args: argparse.Namespace, endpoint: _Endpoint) -> None:
    if args.action == "scale":
        wanted = {"new_data_parallel_size": args.size, "drain_timeout": args.drain_timeout}
        print((await endpoint.call("POST", "/scale_elastic_ep", wanted))["message"])
        return
    for rank in await _ranks(endpoint, args.rank):
        body = {"drain_timeout": args.drain_timeout} if args.action == "restart" else None
        row = await endpoint.call("POST", f"/admin/ranks/{rank}/{args.action}", body)
        print(f"rank {rank}: {row['state']}, epoch {row['epoch']}", flush=True)


async def _ranks(endpoint: _Endpoint, words: Sequence[str]) -> list[str]:
    if "all" not in words:
        return list(words)
    return [str(row["rank"]) for row in (await endpoint.call("GET", "/status"))["ranks"]]

"""`gateway ranks`: what an operator does to the ranks of a running endpoint, over its HTTP routes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp

from cores.words import counted
from gateway.cli.status import DEFAULT_URL, URL_FORMS, base_url
from gateway.config import MAX_RANKS
from gateway.endpoint_url import http_base, make_connector, reason
from gateway.exit_codes import EXIT_FAILED
from gateway.operations import DRAIN_TIMEOUT_S

TIMEOUT_MARGIN_S = 900.0  # to start engines with large weights
LOOK_INTERVAL_S = 0.2  # while drained ranks are waited for


class OrderFailed(Exception):
    """The endpoint did not do it, or could not be reached. One line."""


def add_parser(subparsers: Any) -> None:
    text = "drain, undrain or restart ranks of a running endpoint, or change their number"
    parser = subparsers.add_parser("ranks", help=text, description=text)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, text in (
        ("drain", "no new requests for these ranks; those that they have go on, and are waited for with --wait"),
        ("undrain", "new requests again"),
        ("restart", "drain, end and start again, one rank after the other; no request is lost"),
    ):
        command = actions.add_parser(action, help=text, description=text)
        command.add_argument("rank", nargs="+", help="rank number, or `all`")
        if action == "drain":
            _add_wait(command)
        _add_common(command, has_timeout=action == "restart")
    text = "another number of ranks while serving"
    scale = actions.add_parser("scale", help=text, description=text)
    scale.add_argument("size", type=_size, help=f"how many ranks there shall be, from 1 to {MAX_RANKS}")
    _add_common(scale, has_timeout=True)
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    """Raises `argparse.ArgumentTypeError`."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_RANKS):
        raise argparse.ArgumentTypeError(f"the number of ranks must be from 1 to {MAX_RANKS}, got {text!r:.80}")
    return int(text)


def _add_wait(parser: Any) -> None:
    parser.add_argument("--wait", action="store_true", help="return when nothing runs or waits at these ranks any more")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S",
        help="wait no longer than so many seconds, then exit with 1; the ranks stay drained (default with --wait: no end)",
    )  # fmt: skip


def _seconds(text: str) -> float:
    """Raises `argparse.ArgumentTypeError`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds of at least 0, got {text!r:.80}")
    return seconds


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

    async def rows(self) -> list[dict[str, Any]]:
        """How its ranks are."""
        return list((await self.call("GET", "/status"))["ranks"])


async def _carry_out(args: argparse.Namespace, endpoint: _Endpoint) -> None:
    if args.action == "scale":
        wanted = {"new_data_parallel_size": args.size, "drain_timeout": args.drain_timeout}
        print((await endpoint.call("POST", "/scale_elastic_ep", wanted))["message"])
    elif args.action == "drain":
        await _drain(args, endpoint)
    else:
        await _each(args, endpoint)


async def _each(args: argparse.Namespace, endpoint: _Endpoint) -> None:
    for rank in await _ranks(endpoint, args.rank):
        body = {"drain_timeout": args.drain_timeout} if args.action == "restart" else None
        row = await endpoint.call("POST", f"/admin/ranks/{rank}/{args.action}", body)
        print(f"rank {rank}: {row['state']}, epoch {row['epoch']}", flush=True)


async def _drain(args: argparse.Namespace, endpoint: _Endpoint) -> None:
    numbers, rows = await _ranks(endpoint, args.rank), []
    for number in numbers:
        row = await endpoint.call("POST", f"/admin/ranks/{number}/drain")
        rows = await endpoint.rows()
        print(f"rank {number}: {row['state']}, epoch {row['epoch']}, {_describe(_left(rows, {int(number)}))}", flush=True)
    drained = {int(number) for number in numbers}
    if not any(row["state"] == "ready" and row["rank"] not in drained for row in rows):
        undo = f"gateway ranks undrain {' '.join(args.rank)}"
        print(f"gateway ranks drain: no ready rank is left: new requests get 503 until `{undo}`", file=sys.stderr, flush=True)
    if args.wait or args.timeout is not None:
        await _until_empty(endpoint, drained, args.timeout)


async def _until_empty(endpoint: _Endpoint, drained: set[int], timeout_s: float | None) -> None:
    """Raises `OrderFailed` when it takes longer, or when a rank takes requests again meanwhile."""
    num_left, seen = _left(await endpoint.rows(), drained), set[int]()
    try:
        async with asyncio.timeout(timeout_s):
            while num_left or drained - seen:
                rows = await endpoint.rows()
                ready = {row["rank"] for row in rows if row["state"] == "ready"} & drained
                if back := ready & seen:
                    raise OrderFailed(
                        f"rank {min(back)} takes requests again: somebody has taken it back, or it has started anew"
                    )
                # Another front end than the one that did the order may answer, and not have heard of it yet.
                seen |= drained - ready
                num_left = _left(rows, drained)
                await asyncio.sleep(LOOK_INTERVAL_S if num_left or drained - seen else 0.0)
    except TimeoutError:
        raise OrderFailed(f"{_describe(num_left)} after {timeout_s:g} s; the ranks stay drained") from None
    print("nothing runs or waits there any more", flush=True)


def _left(rows: Sequence[dict[str, Any]], ranks: set[int]) -> int:
    """Sequences. A front end has booked what is on its way, and a rank knows of what a front end that died has sent it."""
    return sum(max(row["waiting"] + row["running"], row["ledger_requests"]) for row in rows if row["rank"] in ranks)


def _describe(num_left: int) -> str:
    return f"{counted(num_left, 'request')} left there" if num_left else "no requests left there"


async def _ranks(endpoint: _Endpoint, words: Sequence[str]) -> list[str]:
    if "all" not in words:
        return list(words)
    return [str(row["rank"]) for row in await endpoint.rows()]

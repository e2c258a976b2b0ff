"""`gateway status`: how a running endpoint and its ranks are."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import uvloop
from rich.console import Console

from gateway.dashboard.board import Board
from gateway.dashboard.feed import Reading, StatusFeed
from gateway.dashboard.live import LiveBoard, follow, read_all, show
from gateway.dashboard.terminal import Terminal
from gateway.endpoint_url import UNIX_PREFIX, socket_path

DEFAULT_URL = "http://127.0.0.1:8000"
URL_FORMS = "http[s]://HOST:PORT or unix:PATH"
EPILOG = "exit status: 0 all ranks ready, 1 degraded (some rank is not ready), 2 an endpoint is unreachable or dead"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("status", help="show how a running endpoint and its ranks are", epilog=EPILOG)
    parser.add_argument(
        "--url",
        action="append",
        type=base_url,
        metavar="URL",
        help=f"endpoint, {URL_FORMS}; may be given several times (default: {DEFAULT_URL})",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--json", action="store_true", help="print the status document and exit; a list for several endpoints")
    parser.add_argument("--interval", type=interval, default=0.5, metavar="S", help="seconds between looks (default: 0.5)")
    parser.add_argument("--ascii", action="store_true", help="no bars and lines but of ASCII, for terminals without others")
    parser.add_argument("--api-key", metavar="KEY", help="bearer token of the endpoints (default: GATEWAY_API_KEY)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    feed = StatusFeed(args.url or [DEFAULT_URL], args.api_key or os.environ.get("GATEWAY_API_KEY"))
    try:
        if args.json:
            return _print_json_of(feed)
        return _draw(feed, args)
    except BrokenPipeError:
        # The reader of a pipe has seen enough. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return feed.exit_code


def _print_json_of(feed: StatusFeed) -> int:
    uvloop.run(_read_once(feed, Board(feed.urls)))
    print_json(feed.latest)
    sys.stdout.flush()  # here, where a reader that has gone is met
    return feed.exit_code


def _draw(feed: StatusFeed, args: argparse.Namespace) -> int:
    console, board, ended_by = _console(), Board(feed.urls), 0
    ascii_only = args.ascii or console.options.ascii_only
    with contextlib.suppress(KeyboardInterrupt):
        if args.once:
            uvloop.run(_read_once(feed, board))
            show(console, board, ascii_only=ascii_only, now=time.monotonic(), is_once=True)
            sys.stdout.flush()
        elif console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty():
            ended_by = uvloop.run(_live(console, feed, args.interval, board, ascii_only=ascii_only))
        else:
            uvloop.run(_follow(console, feed, args.interval, board, ascii_only=ascii_only))
    return 128 + ended_by if ended_by else feed.exit_code


async def _read_once(feed: StatusFeed, board: Board) -> None:
    async with feed:
        await read_all(feed, board)


async def _live(console: Console, feed: StatusFeed, interval_s: float, board: Board, *, ascii_only: bool) -> int:
    async with feed:
        return await LiveBoard(Terminal(console), feed, interval_s, board, ascii_only=ascii_only).run()


async def _follow(console: Console, feed: StatusFeed, interval_s: float, board: Board, *, ascii_only: bool) -> None:
    async with feed:
        await follow(console, feed, interval_s, board, ascii_only=ascii_only)


def print_json(readings: Sequence[Reading]) -> None:
    """The document as it came; of several endpoints a list, with an error object for one that cannot be read."""
    for reading in readings:
        if reading.error is not None:
            print(f"gateway status: {reading.url}: {reading.error}", file=sys.stderr)
    if len(readings) > 1:
        documents = [reading.document or {"url": reading.url, "error": reading.error} for reading in readings]
        print(json.dumps(documents, indent=2))
    elif readings[0].document is not None:
        print(json.dumps(readings[0].document, indent=2))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the program with 1, which here says that a rank is not well


def _console() -> Console:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a cause of death may hold any character, a terminal not
    return _Console(highlight=False)


def base_url(text: str) -> str:
    """Also of what OpenAI's clients are given, which ends in `/v1`. Raises `argparse.ArgumentTypeError`."""
    if text.startswith(UNIX_PREFIX):
        if not (socket_path(text) or "").strip("/"):
            raise argparse.ArgumentTypeError(f"{text!r} names no socket; allowed: unix:PATH")
        return text
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for a port that is no port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; allowed: http://HOST:PORT, https://HOST:PORT or unix:PATH")
    url = url.rstrip("/")
    return url.removesuffix("/v1").rstrip("/") if parts.path.rstrip("/").endswith("/v1") else url


def interval(text: str) -> float:
    """Raises `argparse.ArgumentTypeError`."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.1 and 3600 seconds, got {text}")
    return seconds

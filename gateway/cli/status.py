"""`gateway status`: how a running endpoint and its ranks are."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from gateway.dashboard.feed import Reading, StatusFeed, exit_code
from gateway.dashboard.live import show, watch

DEFAULT_URL = "http://127.0.0.1:8000"
EPILOG = "exit status: 0 all ranks ready, 1 degraded (some rank is not ready), 2 an endpoint is unreachable or dead"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("status", help="show how a running endpoint and its ranks are", epilog=EPILOG)
    parser.add_argument(
        "--url",
        action="append",
        type=base_url,
        metavar="URL",
        help=f"endpoint; may be given several times (default: {DEFAULT_URL})",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--json", action="store_true", help="print the status document and exit; a list for several endpoints")
    parser.add_argument("--interval", type=interval, default=1.0, metavar="S", help="seconds between frames (default: 1.0)")
    parser.add_argument("--api-key", metavar="KEY", help="bearer token of the endpoints (default: GATEWAY_API_KEY)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    feed = StatusFeed(args.url or [DEFAULT_URL], args.api_key or os.environ.get("GATEWAY_API_KEY"))
    latest: list[Reading] = []
    try:
        if args.json or args.once:
            asyncio.run(_read_once(feed, latest))
            print_json(latest) if args.json else show(_console(), latest)
            sys.stdout.flush()  # here, where a reader that has gone is met
        else:
            asyncio.run(_watch(feed, args.interval, latest))
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # The reader of a pipe has seen enough. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(latest)


async def _read_once(feed: StatusFeed, latest: list[Reading]) -> None:
    async with feed:
        latest += await feed.read()


async def _watch(feed: StatusFeed, interval_s: float, latest: list[Reading]) -> None:
    async with feed:
        await watch(_console(), feed, interval_s, latest)


def print_json(readings: list[Reading]) -> None:
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
    return _Console()


def base_url(text: str) -> str:
    """Raises `argparse.ArgumentTypeError`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for a port that is no port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; allowed: http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def interval(text: str) -> float:
    """Raises `argparse.ArgumentTypeError`."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.1 and 3600 seconds, got {text}")
    return seconds

"""Draws one frame of `gateway status` as an SVG, the README's picture: `python scripts/status_picture.py URL OUT.svg`."""

from __future__ import annotations

import io
import sys
import urllib.request

from rich.console import Console

from gateway.dashboard.feed import parse
from gateway.dashboard.view import render

WIDTH = 118


def main() -> None:
    url, out = sys.argv[1:]
    with urllib.request.urlopen(f"{url}/status", timeout=10) as response:
        reading = parse(url, response.read())
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(render([reading], WIDTH))
    console.save_svg(out, title="gateway status")


if __name__ == "__main__":
    main()

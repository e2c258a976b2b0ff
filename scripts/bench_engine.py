"""The engine's benchmarks, each a mode of its own and a module of `scripts.benchmarks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.engine_overhead import overhead
from scripts.benchmarks.report import publish


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_engine", description=__doc__)
    parser.add_argument("--overhead", action="store_true", help="what a step costs beside the model's forward")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of each figure; medians count (default: 5)")
    args = parser.parse_args(arguments)
    if not args.overhead:
        parser.error("choose what to measure: --overhead")
    publish(overhead(args.runs), args.runs, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

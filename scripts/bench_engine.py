"""The engine beside vLLM's CPU build and `transformers`, in one run; or, with --overhead, what a step costs without the model.

The comparison takes about ten minutes with `PEERS`, three without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.engine_comparison import CONCURRENCIES, compare_engines
from scripts.benchmarks.engine_overhead import overhead
from scripts.benchmarks.report import publish
from scripts.benchmarks.servers import Peers, end_in_order_on_sigterm, model_directory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_engine", description=__doc__)
    parser.add_argument("--overhead", action="store_true", help="what a step costs beside the model's forward")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=CONCURRENCIES, metavar="N",
        help=f"requests at a time, in the comparison (default: {' '.join(map(str, CONCURRENCIES))})",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--runs", type=int, metavar="N", help="of each figure; medians count (default: 3, with --overhead 5)")
    args = parser.parse_args(arguments)
    runs = args.runs or (5 if args.overhead else 3)
    if args.overhead:
        rows = overhead(runs)
    else:
        end_in_order_on_sigterm()
        rows = compare_engines(model_directory(), Peers.from_environment(), runs, args.concurrency)
    publish(rows, runs, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

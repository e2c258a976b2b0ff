"""What a benchmark prints and writes: one row per figure, with a peer's beside ours. Pure but for `machine` and `publish`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` is ours / peer's. Whether more is better, the unit says."""

    name: str
    ours: float | None
    peer: str  # who it is, and "not installed" where there is nobody to compare with
    peer_value: float | None
    ratio: float | None
    unit: str


def compare(name: str, unit: str, ours: Sequence[float], peer: str, theirs: Sequence[float] | None) -> Row:
    """Medians over runs. `theirs` is None if the peer is not there: a row that says so, never a guess."""
    our_value = median(ours) if ours else None
    if theirs is None:
        return Row(name, our_value, f"{peer}: {NOT_INSTALLED}", None, None, unit)
    peer_value = median(theirs) if theirs else None
    ratio = our_value / peer_value if our_value is not None and peer_value else None
    return Row(name, our_value, peer, peer_value, ratio, unit)


def table(rows: Iterable[Row]) -> str:
    cells = [("", "ours", "peer's", "ratio", "unit", "peer")]
    cells += [(row.name, _number(row.ours), _number(row.peer_value), _number(row.ratio), row.unit, row.peer) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers, unit, peer in cells:
        right = (number.rjust(width) for number, width in zip(numbers, widths[1:4], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *right, unit.ljust(widths[4]), peer)).rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """Three digits, which is more than a benchmark knows."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """What the figures depend on, without names that tell whose it is."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def publish(rows: Sequence[Row], runs: int, path: Path | None) -> None:
    """The table on stdout; the same as JSON if there is a path for it."""
    print(table(rows))
    if path is not None:
        document = {"machine": machine(), "runs": runs, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

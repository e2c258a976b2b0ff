"""`scripts/bench_engine` writes what the other benchmarks write. What it measures is looked at by people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench_engine import main


def test_overhead_is_a_table_and_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main(["--overhead", "--runs", "1", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert set(document) == {"machine", "runs", "rows"}
    assert document["runs"] == 1
    step, *parts = document["rows"]
    assert set(step) == {"name", "ours", "peer", "peer_value", "ratio", "unit"}
    assert (step["name"], step["peer"], step["peer_value"], step["unit"]) == (
        "step of 64 decodes, simulated runner", "limit", 1.0, "ms",
    )  # fmt: skip
    assert step["ratio"] == step["ours"] / step["peer_value"] > 0
    assert all(part["ours"] > 0 and part["peer_value"] is None for part in parts)
    table = capsys.readouterr().out
    assert all(row["name"] in table for row in document["rows"])

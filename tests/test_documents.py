"""What the documents say of tests: each named one is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["ARCHITECTURE.md", "THREAT_MODEL.md"]
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_a_document_names_exists(document: str) -> None:
    named = _TEST.findall((ROOT / document).read_text())
    assert named
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_failure_has_its_test() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Death and doubt")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    assert [row.split("|")[1].strip() for row in rows if not _TEST.search(row.rsplit("|", 2)[1])] == []

"""Chaos, for a short while: `scripts/chaos --minutes 30` does it by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_answer_is_lost_or_changed_whatever_happens_to_the_ranks() -> None:
    command = [sys.executable, "-m", "scripts.chaos", "--minutes", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

"""The soak, for a short while: `scripts/soak --seconds 600` does it by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_random_requests_of_every_kind_are_exact_and_leave_nothing_behind() -> None:
    command = [sys.executable, "-m", "scripts.soak", "--seconds", "60"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

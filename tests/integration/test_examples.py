"""What stands in `examples/` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cores.testing import make_tiny_model_dir

ROOT = Path(__file__).resolve().parents[2]


def test_embedded_example(tmp_path: Path) -> None:
    model = make_tiny_model_dir(tmp_path / "tiny")
    command = [sys.executable, "examples/embedded.py", str(model), "simulated"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "(rank 0)" in result.stdout
    assert "(rank 1)" in result.stdout

"""The architecture's import rules hold, and the front end stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_import_contracts_are_kept() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def test_front_end_loads_neither_torch_nor_ray_nor_transformers() -> None:
    code = (
        "import sys, gateway.server.app, gateway.async_llm, gateway.front_end\n"
        "print(*(m for m in ('torch', 'ray', 'transformers', 'numpy', 'llguidance') if m in sys.modules))"
    )
    assert run(sys.executable, "-c", code).split() == []

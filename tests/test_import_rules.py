"""The architecture's import rules hold, and the front end stays small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_import_contracts_are_kept() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


LEAF = {
    "cores", "cores.block_hash", "cores.codec", "cores.config", "cores.control_messages", "cores.curve", "cores.gaps",
    "cores.log", "cores.log_queue", "cores.messages", "cores.pooling_params", "cores.sampling_params", "cores.user_cache",
    "cores.words",
}  # fmt: skip


ENGINE_STATE = {"cores.cache_watch", "cores.kv_cache_manager", "cores.request", "cores.scheduler", "cores.step_times"}
ENGINE = ENGINE_STATE | {"cores.runner.interface"}


def imported_by(files: Iterable[Path]) -> set[str]:
    """Modules of the other two packages."""
    return {
        name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names if node.module == "cores"))
        if name.split(".")[0] in ("cores", "gateway")
    }


def test_balancer_imports_nothing_of_cores_but_the_leaf() -> None:
    """By what is allowed, where the contract lists what is not: a new module is forbidden at once."""
    simulation = set((ROOT / "balancer" / "simulation").rglob("*.py"))
    assert imported_by(set((ROOT / "balancer").rglob("*.py")) - simulation) <= LEAF
    assert imported_by(simulation) <= LEAF | ENGINE


def test_gateway_imports_nothing_of_cores_but_the_leaf_and_the_launchers() -> None:
    files = {path for path in (ROOT / "gateway").rglob("*.py") if path.name != "grammar_process.py"}
    imported = {name for name in imported_by(files) if name.startswith("cores") and not name.startswith("cores.launch.")}
    assert imported <= LEAF


def test_front_end_loads_neither_torch_nor_ray_nor_transformers() -> None:
    code = (
        "import sys, gateway.server.app, gateway.async_llm, gateway.front_end\n"
        "print(*(m for m in ('torch', 'ray', 'transformers', 'numpy', 'llguidance') if m in sys.modules))"
    )
    assert run(sys.executable, "-c", code).split() == []


@pytest.mark.parametrize(
    ("engine", "backend", "to_install"),
    [
        ("torch", "mp", "install dp-gateway[cores]"),
        ("torch", "ray", "install dp-gateway[cores]"),
        ("vllm", "mp", "install dp-gateway[vllm]"),
    ],
)
def test_without_its_engine_serve_says_what_to_install_and_not_a_traceback(engine: str, backend: str, to_install: str) -> None:
    code = (
        f"import sys; sys.modules[{engine!r}] = None\n"  # to every import it is not installed
        "from gateway.__main__ import main; sys.exit(main())"
    )
    words = ["serve", ".", "--engine", engine, "--data-parallel-backend", backend, "--port", "0"]
    result = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert f"--engine {engine} needs the package {engine}, which is not installed: {to_install}" in result.stderr
    assert "Traceback" not in result.stderr

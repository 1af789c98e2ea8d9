"""The floors of the house: who may import whom, and who does without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_only_point_down() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("module", ["torchstone.cli", "torchstone.client", "torchstone.store", "service.app"])
def test_the_contract_and_the_service_import_without_torch(module: str) -> None:
    code = f"import tests.no_torch, {module}; import sys; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "numpy", "scipy"} & set(run.stdout.split())


def test_the_service_starts_without_what_only_terminals_need() -> None:
    code = "import service.__main__, sys; print(*sorted(sys.modules)); import rich.table"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "structlog" in run.stdout.split() and "rich" not in run.stdout.split()


def test_the_worker_above_the_wall_never_imports_torch() -> None:
    code = "import worker.__main__, worker.app, worker.host, worker.launch, sys; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "fastapi", "service"} & set(run.stdout.split())


def test_no_module_is_over_four_hundred_lines() -> None:
    modules = [path for house in ("torchstone", "service", "worker") for path in (ROOT / house).rglob("*.py")]
    assert len(modules) > 20
    long = {str(path.relative_to(ROOT)): n for path in modules if (n := len(path.read_text().splitlines())) > 400}
    assert not long

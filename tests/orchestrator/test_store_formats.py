"""Run folders over their life: written by older releases, submitted again with other settings."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grids.loading import dump_grid, parse_grid
from grids.spec import GridSpec
from orchestrator.control.data import run_identity
from orchestrator.store.cell_state import CellState, Spent
from orchestrator.store.cell_store import last_row
from orchestrator.store.lease import Lease
from orchestrator.store.run_store import RunStore, SpecDiffers, State, StoreDamaged, fingerprint
from tests.orchestrator.test_store import write_checkpoint

RUN_V1 = Path(__file__).parent / "fixtures" / "run_v1"
"""Written by the release that wrote format 1: ``bp2-n2-s0`` finished its 8 steps, ``bp2-n4-s0`` was killed
after a row of step 3 with step 2 of 4 committed."""

GRID = """
name: tiny
model: {path: /models/tiny}
problems: {train: /problems/train.jsonl, validation: /problems/validation.jsonl}
grid: {problems_per_batch: [2], rollouts_per_problem: [2, 4], compute_rollouts: 32}
recipe: {type: easy}
optimiser: {learning_rate: 2e-4}
sampling: {max_tokens: 8, prompt_template: "{prompt}="}
evaluation: {first_mark: 16}
tracking: {mlflow_uri: "http://127.0.0.1:5000"}
"""


def spec(old: str = "", new: str = "") -> GridSpec:
    assert old in GRID
    return parse_grid(GRID.replace(old, new), Path("/grid.yaml"))


def submit(run_dir: Path, grid: GridSpec, weights: str | None = None, torch: str = "2.13.0") -> RunStore:
    """A submission as ``run`` makes it, up to the point where cells are read."""
    identity = run_identity(grid, "train-content", "validation-content", "model-content", weights)
    resolved = {"run_id": f"new-{torch}", "spec": dump_grid(grid), "versions": {"torch": torch}}
    store = RunStore.open(run_dir, identity, resolved)
    time = iter(range(0, 10**6, 1000))
    lease = Lease.acquire(store.lease_dir, "test", 30.0, lambda: float(next(time)), lambda seconds: None)
    store.hold(lease.epoch, lambda: None)
    store.update_resolved(resolved)
    return store


def grid_file(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((run_dir / "grid.yaml").read_text())


@pytest.fixture
def run_v1(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN_V1, tmp_path / "run"))


# Format 1


def test_a_run_of_format_1_is_read(run_v1: Path) -> None:
    before = {path: path.read_bytes() for path in run_v1.rglob("*") if path.is_file()}
    store = RunStore.existing(run_v1)
    states = store.states()
    finished, killed = states["bp2-n2-s0"], states["bp2-n4-s0"]
    assert (finished.state, finished.attempt, killed.state, killed.attempt) == ("finished", 1, "running", 2)
    assert finished.commit is not None and killed.commit is not None
    assert (finished.commit.step, killed.commit.step) == (8, 2)
    assert killed.commit.progress == {"step": 2, "compute_tokens": 400}
    assert (killed.commit.layout, killed.spent, killed.deviations) == (None, Spent(), ())
    assert [row["step"] for row in store.cell("bp2-n2-s0").rows()] == [4, 8]
    assert last_row(store.history_path("bp2-n2-s0")) == store.cell("bp2-n2-s0").rows()[-1]
    assert store.cell("bp2-n4-s0").attempts() == []
    assert store.read_base() == {"step": 0, "compute_rollouts": 0, "avg_at_4": 0.25}
    assert (store.resolved["run_id"], store.resolved["spec"]["grid"]["compute_rollouts"]) == ("5c0ffee0", 32)
    assert {path: path.read_bytes() for path in run_v1.rglob("*") if path.is_file()} == before


def test_a_run_of_format_1_is_continued_and_finished(run_v1: Path) -> None:
    store = submit(run_v1, spec())
    untouched = (run_v1 / "cells" / "bp2-n2-s0" / "state.json").read_bytes()
    cell = store.cell("bp2-n4-s0")
    started = cell.start_attempt()
    assert (started.attempt, started.version, started.epoch) == (3, 2, 2)
    assert started.commit is not None and started.commit.checkpoint is not None
    assert (cell.folder / started.commit.checkpoint / "model.txt").read_text() == "weights of step 2\n"
    assert [row["step"] for row in cell.rows()] == [1, 2]
    for step in (3, 4):
        cell.append_row({"step": step})
    cell.commit(4, write_checkpoint(cell, 4), {"step": 4}, state=State.FINISHED, layout={"ranks": 1})
    cell.end_attempt("finished")
    again = RunStore.existing(run_v1)
    assert {state.state for state in again.states().values()} == {State.FINISHED}
    assert [row["step"] for row in again.cell("bp2-n4-s0").rows()] == [1, 2, 3, 4]
    assert [(record.attempt, record.first_step) for record in cell.attempts()] == [(3, 3)]
    assert (run_v1 / "cells" / "bp2-n2-s0" / "state.json").read_bytes() == untouched


def test_a_finished_cell_of_format_1_goes_on_under_a_larger_budget(run_v1: Path) -> None:
    cell = submit(run_v1, spec("compute_rollouts: 32", "compute_rollouts: 64")).cell("bp2-n2-s0")
    reopened = cell.reopen(16)
    assert (reopened.state, reopened.version, reopened.attempt) == (State.PENDING, 2, 1)
    commit = cell.start_attempt().commit
    assert commit is not None and commit.step == 8
    assert [row["step"] for row in cell.rows()] == [4, 8]


def test_a_grid_file_of_format_1_is_brought_up_to_date_by_a_submission(run_v1: Path) -> None:
    submit(run_v1, spec())
    content = grid_file(run_v1)
    assert content["version"] == 2
    assert content["resolved"]["run_id"] == "5c0ffee0"
    assert "failures" in content["resolved"]["spec"] and "failures" not in content["identity"]
    assert "compute_rollouts" not in content["identity"]["grid"]
    assert content["fingerprint"] == fingerprint(content["identity"])
    submit(run_v1, spec())
    assert grid_file(run_v1) == content


def test_a_run_of_format_1_refuses_another_grid_and_a_smaller_budget(run_v1: Path) -> None:
    with pytest.raises(SpecDiffers, match=r"optimiser\.learning_rate: 0\.0002 -> 0\.0003"):
        submit(run_v1, spec("2e-4", "3e-4"))
    with pytest.raises(SpecDiffers, match=r"grid\.compute_rollouts: 32 -> 16"):
        submit(run_v1, spec("compute_rollouts: 32", "compute_rollouts: 16"))


def test_contents_of_large_weights_bind_a_run_unless_format_1_began_it(run_v1: Path, tmp_path: Path) -> None:
    submit(run_v1, spec(), weights="blocks")
    submit(run_v1, spec(), weights="blocks")
    submit(tmp_path / "new", spec(), weights="blocks")
    with pytest.raises(SpecDiffers, match=r'model\.weights: "blocks" -> "others"'):
        submit(tmp_path / "new", spec(), weights="others")


@pytest.mark.parametrize("name", ["grid.yaml", "cells/bp2-n2-s0/state.json"])
def test_a_later_format_is_refused(run_v1: Path, name: str) -> None:
    path = run_v1 / name
    text = path.read_text()
    assert text.replace('"version": 1', "").replace("version: 1\n", "") != text
    path.write_text(text.replace('"version": 1', '"version": 3').replace("version: 1\n", "version: 3\n"))
    with pytest.raises(StoreDamaged, match=f"{name}: .*format 3.*; use the release that wrote the run"):
        RunStore.existing(run_v1).states()


def test_a_state_of_format_1_is_written_again_as_format_2(run_v1: Path) -> None:
    path = run_v1 / "cells" / "bp2-n4-s0" / "state.json"
    state = CellState.from_bytes(path.read_bytes(), path)
    assert CellState.from_bytes(state.to_bytes(), path) == state
    assert b'"version": 2' in state.to_bytes()


# Submitted again


def test_settings_that_may_change_are_brought_up_to_date_and_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    submit(run_dir, spec())
    larger = spec("compute_rollouts: 32}", "compute_rollouts: 64}\nfailures: {own_failures: 9}")
    store = submit(run_dir, larger, torch="2.14.0")
    content = grid_file(run_dir)
    assert content["resolved"] == store.resolved == RunStore.existing(run_dir).resolved
    assert content["resolved"]["run_id"] == "new-2.13.0"
    assert content["resolved"]["versions"] == {"torch": "2.14.0"}
    assert GridSpec.model_validate(content["resolved"]["spec"]) == larger
    first, second = content["submissions"]
    assert (first["versions"], first["changed"]) == ({"torch": "2.13.0"}, [])
    assert second["versions"] == {"torch": "2.14.0"}
    assert second["changed"] == [
        "spec.grid.compute_rollouts: 32 -> 64",
        "spec.failures.own_failures: 3 -> 9",
        'versions.torch: "2.13.0" -> "2.14.0"',
    ]
    submit(run_dir, larger, torch="2.14.0")
    assert len(grid_file(run_dir)["submissions"]) == 2


def test_a_budget_can_grow_and_never_shrink(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    submit(run_dir, spec())
    larger = spec("compute_rollouts: 32", "compute_rollouts: 64")
    submit(run_dir, larger)
    for refused in (32, 63):
        smaller = spec("compute_rollouts: 32", f"compute_rollouts: {refused}")
        with pytest.raises(SpecDiffers, match=rf"grid\.compute_rollouts: 64 -> {refused}: .* 64 or more"):
            submit(run_dir, smaller)
    assert grid_file(run_dir)["resolved"]["spec"]["grid"]["compute_rollouts"] == 64


def test_a_budget_raised_by_another_controller_meanwhile_is_not_lowered(tmp_path: Path) -> None:
    first = submit(tmp_path, spec())
    submit(tmp_path, spec("compute_rollouts: 32", "compute_rollouts: 64"))
    with pytest.raises(SpecDiffers, match="64 -> 32"):
        first.update_resolved({"spec": dump_grid(spec())})


def test_only_a_holder_brings_a_run_up_to_date(tmp_path: Path) -> None:
    submit(tmp_path, spec())
    with pytest.raises(RuntimeError, match="lease"):
        RunStore.existing(tmp_path).update_resolved({"spec": dump_grid(spec())})

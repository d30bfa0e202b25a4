"""A grid from YAML to frontier on real Ray, vLLM, FSDP and MLflow: undisturbed, run again, and refused.

Nothing of the path is replaced: the grid goes through ``isocompute submit`` to a local head that needs a token.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient

from analysis.reading.sources import read_run
from analysis.tables import HISTORY_COLUMNS
from benchmarks.site import QUICKSTART, ROOT, GridOptions, Site
from orchestrator.operating.status_view import StatusView
from orchestrator.tracking.mlflow_source import read_experiment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CELLS = {"bp8-n4-s0": 32, "bp8-n8-s0": 16}
"""Cells and their update steps M = 1024 / B."""
MARKS = [64, 128, 256, 512, 1024]
TRAINING_PROBLEMS = len((QUICKSTART / "easy_train.jsonl").read_text().splitlines())


def test_every_cell_finishes_with_a_row_at_each_mark(site: Site, undisturbed: Path) -> None:
    for cell, steps in CELLS.items():
        state = site.state(undisturbed, cell)
        assert (state["state"], state["attempt"], state["commit"]["step"]) == ("finished", 1, steps)
        rows = site.history(undisturbed, cell)
        assert [row["compute_rollouts"] for row in rows] == MARKS
        assert [row["step"] for row in rows] == [mark * steps // 1024 for mark in MARKS]


def test_every_column_of_a_row_is_described(site: Site, undisturbed: Path) -> None:
    described = [re.sub("K$", "[0-9]+", name).replace("*", "[a-z]+") for name in HISTORY_COLUMNS]
    row = site.history(undisturbed, "bp8-n4-s0")[0]
    for column in row:
        assert any(re.fullmatch(pattern, column) for pattern in described), column
    # And the other way round, K being 4 for the validation and 2 for the probe.
    for pattern in described:
        assert any(re.fullmatch(pattern, column) for column in row), pattern


def test_compute_is_counted_in_epochs_and_accelerator_time(site: Site, undisturbed: Path) -> None:
    for cell in CELLS:
        rows = site.history(undisturbed, cell)
        assert [row["epochs"] for row in rows] == [row["step"] * 8 / TRAINING_PROBLEMS for row in rows]
        # One core samples and one learns; the seconds of a row are means over the steps since the previous one.
        steps, spent = 0, 0.0
        for row in rows:
            spent += (row["step"] - steps) * (row["seconds_sampling"] + row["seconds_learning"])
            steps = row["step"]
            assert row["accelerator_seconds"] == pytest.approx(spent)
            assert spent > 0


def test_scores_follow_from_the_right_answers_to_each_problem(site: Site, undisturbed: Path) -> None:
    base = json.loads((site.run_dir(undisturbed) / "base.json").read_text())
    for row in [base, *site.history(undisturbed, "bp8-n4-s0"), *site.history(undisturbed, "bp8-n8-s0")]:
        right, probe = row["eval_right"], row["train_probe_right"]
        assert len(right) == 64 and all(type(count) is int and 0 <= count <= 4 for count in right)
        assert row["avg_at_4"] == sum(right) / 256
        assert row["best_at_4"] == sum(count > 0 for count in right) / 64
        assert row["worst_at_4"] == sum(count == 4 for count in right) / 64
        assert len(probe) == 10 and all(type(count) is int and 0 <= count <= 2 for count in probe)
        assert row["train_probe_avg_at_2"] == sum(probe) / 20


def test_sampler_and_learner_agree_in_every_row(site: Site, undisturbed: Path) -> None:
    for cell in CELLS:
        for row in site.history(undisturbed, cell):
            assert 0 < row["logprob_difference"] < 1e-3
            assert abs(row["importance_ratio"] - 1) < 1e-3


def test_scores_are_those_of_the_kept_definition(site: Site, undisturbed: Path) -> None:
    for cell in CELLS:
        for row in site.history(undisturbed, cell):
            assert 0 <= row["worst_at_4"] <= row["avg_at_4"] <= row["best_at_4"] <= 1
            # 64 problems of 4 answers.
            assert (row["avg_at_4"] * 256).is_integer() and (row["best_at_4"] * 64).is_integer()
        samples = sorted((site.run_dir(undisturbed) / "cells" / cell / "samples").iterdir())
        assert len(samples) == len(MARKS)
        for line in samples[-1].read_text().splitlines():
            sample = json.loads(line)
            # The quickstart's answers are bare integers, so the reward can be worked out from the text.
            right = sample["response"].strip() == sample["gold"] and not sample["truncated"]
            assert sample["reward"] == float(right)


def test_the_model_learns_from_its_rewards(site: Site, undisturbed: Path) -> None:
    """Weights move with the reward's gradient: the gradient is finite and not zero, and the policy leaves the base."""
    for cell in CELLS:
        last = site.history(undisturbed, cell)[-1]
        assert last["grad_norm"] > 0
        assert last["kl"] > 0


def test_a_report_and_a_frontier_are_written(site: Site, undisturbed: Path) -> None:
    report = site.run_dir(undisturbed) / "report"
    frontier = json.loads((report / "frontier.json").read_text())
    assert {cell["cell"] for cell in frontier["cells"]} == set(CELLS)
    assert "not identified" in (report / "report.html").read_text()


def test_mlflow_holds_one_parent_and_one_child_for_each_cell(site: Site, undisturbed: Path) -> None:
    client = MlflowClient(site.mlflow_uri)
    experiment = client.get_experiment_by_name("undisturbed")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.tags["isocompute.cell"]: run for run in runs if run is not parent}
    assert set(children) == set(CELLS)
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    for cell, run in children.items():
        points = client.get_metric_history(run.info.run_id, "avg_at_4")
        rows = site.history(undisturbed, cell)
        base = json.loads((site.run_dir(undisturbed) / "base.json").read_text())
        expected = [(row["compute_rollouts"], row["avg_at_4"]) for row in [base, *rows]]
        assert [(point.step, point.value) for point in points] == expected
        assert expected[0][0] == 0
        assert int(run.data.params["rollouts_per_problem"]) == rows[0]["rollouts_per_problem"]
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id, "report")}
    assert {"report/report.html", "report/frontier.json", "report/frontier.svg"} <= artifacts


def test_mlflow_gives_the_tables_of_the_run_folder(site: Site, undisturbed: Path) -> None:
    folder = read_run(site.run_dir(undisturbed))
    (mlflow,) = read_experiment(site.mlflow_uri, "undisturbed")
    assert len(folder.history) == len(CELLS) * len(MARKS)
    lists = ["eval_right", "train_probe_right"]
    pd.testing.assert_frame_equal(
        mlflow.history.drop(columns=lists), folder.history.drop(columns=lists), check_exact=True
    )
    for column in lists:
        assert np.array_equal(np.stack(mlflow.history[column]), np.stack(folder.history[column]))
    assert folder.base is not None and mlflow.base is not None
    assert folder.base.keys() == mlflow.base.keys()
    for name, value in folder.base.items():
        assert np.array_equal(mlflow.base[name], value), name
    assert (mlflow.states, mlflow.reasons, mlflow.spec) == (folder.states, folder.reasons, folder.spec)
    assert mlflow.complaints == folder.complaints == {}


def test_a_finished_grid_is_not_trained_again(site: Site, undisturbed: Path) -> None:
    run_dir = site.run_dir(undisturbed)
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "cells").rglob("*") if path.is_file()}
    code, output = site.run(undisturbed).wait()
    assert code == 0, output
    assert "2 cells, 0 to do" in output
    assert {
        path: path.stat().st_mtime_ns for path in (run_dir / "cells").rglob("*") if path.is_file()
    } == before


def test_a_canary_trains_two_steps_of_two_cells_and_predicts_from_them(site: Site, tmp_path: Path) -> None:
    grid = site.write_grid("sung")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "plan", str(grid), "--canary"],
        cwd=tmp_path,
        env=site.environment("direct") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "sung-canary"
    assert f"predicted from the phases of {run_dir}: " in done.stdout
    rows, _, _ = StatusView(run_dir).read(None)
    assert [(row["cell"], row["state"], row["step"], row["M"]) for row in rows] == [
        (cell, "finished", 2, 2) for cell in CELLS
    ]
    assert not (run_dir / "report").exists()


def test_a_grid_that_asks_for_more_than_the_cluster_is_refused_at_once(site: Site) -> None:
    grid = site.write_grid("greedy", GridOptions(learners=50))
    started = time.monotonic()
    code, output = site.finish(grid)
    assert code == 2, output
    assert "pools: the grid needs" in output and "the cluster has 4" in output
    assert time.monotonic() - started < 90


def test_a_changed_grid_is_refused_with_the_difference(site: Site, undisturbed: Path) -> None:
    changed = undisturbed.read_text().replace("2e-4", "3e-4")
    text = undisturbed.read_text()
    undisturbed.write_text(changed)
    try:
        code, output = site.run(undisturbed).wait()
    finally:
        undisturbed.write_text(text)
    assert code == 2, output
    assert "optimiser.learning_rate: 0.0002 -> 0.0003" in output

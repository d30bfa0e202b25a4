"""A grid from YAML to frontier on real Ray, vLLM, FSDP and MLflow: undisturbed, killed and continued, and run again.

Nothing of the path is replaced: the grid goes through ``isocompute submit`` to a local head that needs a token.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from mlflow import MlflowClient

from analysis.reading.sources import read_run
from analysis.tables import HISTORY_COLUMNS
from orchestrator.local import LocalServices, free_port
from orchestrator.mlflow_source import read_experiment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

QUICKSTART = Path(__file__).parents[1] / "grids" / "quickstart"
GRID = """
name: {name}
model: {{path: {quickstart}/model}}
problems: {{train: {quickstart}/easy_train.jsonl, validation: {folder}/validation.jsonl}}
grid: {{problems_per_batch: [8], rollouts_per_problem: [4, 8], seeds: [0], compute_rollouts: 1024}}
recipe: {{type: easy}}
optimiser: {{learning_rate: 2e-4}}
sampling: {{temperature: 1.0, max_tokens: 8, prompt_template: "{{prompt}}="}}
evaluation:
  {{first_mark: 64, marks_per_doubling: 1, kept_rollouts: 3, train_probe: {{problems: 10, samples_per_problem: 2}}}}
pools: {{samplers: {{max_sequences: 256}}, learners: {{count: {learners}, ranks: {ranks}}}}}
tracking: {{mlflow_uri: "{mlflow_uri}"}}
commits: {{every_steps: 3}}
"""
CELLS = {"bp8-n4-s0": 32, "bp8-n8-s0": 16}
"""Cells and their update steps M = 1024 / B."""
MARKS = [64, 128, 256, 512, 1024]
MEASURED = ("seconds_", "accelerator_seconds", "logged_at_ms")
TRAINING_PROBLEMS = len((QUICKSTART / "easy_train.jsonl").read_text().splitlines())


@dataclass
class Site:
    """A folder with grids, and the services that they run on."""

    folder: Path
    services: LocalServices

    def write_grid(self, name: str, learners: int = 2, ranks: int = 1) -> Path:
        path = self.folder / f"{name}.yaml"
        text = GRID.format(
            name=name,
            quickstart=QUICKSTART,
            folder=self.folder,
            learners=learners,
            ranks=ranks,
            mlflow_uri=self.services.mlflow_uri,
        )
        path.write_text(text)
        return path

    def submit(self, grid: Path) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "submit",
            str(grid),
            "--run-dir",
            str(self.run_dir(grid)),
        ]
        return subprocess.Popen(
            command,
            env=os.environ | self.services.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_dir(self, grid: Path) -> Path:
        return self.folder / "runs" / grid.stem

    def finish(self, grid: Path) -> tuple[int, str]:
        """Submit and wait; exit code and output."""
        process = self.submit(grid)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def history(self, grid: Path, cell: str) -> list[dict[str, Any]]:
        path = self.run_dir(grid) / "cells" / cell / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def state(self, grid: Path, cell: str) -> dict[str, Any]:
        path = self.run_dir(grid) / "cells" / cell / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def committed_step(self, grid: Path, cell: str) -> int:
        commit = self.state(grid, cell).get("commit")
        return commit["step"] if commit else 0


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait for a condition while a submission runs."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    problems = (QUICKSTART / "easy_validation.jsonl").read_text().splitlines()[:64]
    (folder / "validation.jsonl").write_text("\n".join(problems) + "\n")
    services = LocalServices(folder / "services", dashboard_port=free_port(), mlflow_port=free_port(), cpus=4)
    with services:
        yield Site(folder, services)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Path:
    """A grid that ran from start to end."""
    grid = site.write_grid("undisturbed")
    code, output = site.finish(grid)
    assert code == 0, output
    return grid


def without_measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def job_processes(run_dir: Path) -> list[psutil.Process]:
    """The controllers of a run: processes whose command line is ``... orchestrator run ... --run-dir <run_dir>``."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "run" in (line := process.info["cmdline"] or []) and str(run_dir) in line and "submit" not in line
    ]


def engines_of(site: Site) -> list[psutil.Process]:
    """The processes of sampler actors below this site's services, told by the token file that they inherited."""
    token = site.services.environment()["RAY_AUTH_TOKEN_PATH"]
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("SamplerActor" in part for part in process.info["cmdline"] or [])
        and process.environ().get("RAY_AUTH_TOKEN_PATH") == token
    ]


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
    client = MlflowClient(site.services.mlflow_uri)
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
    (mlflow,) = read_experiment(site.services.mlflow_uri, "undisturbed")
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
    code, output = site.finish(undisturbed)
    assert code == 0, output
    assert "2 cells, 2 done" in output
    assert {
        path: path.stat().st_mtime_ns for path in (run_dir / "cells").rglob("*") if path.is_file()
    } == before


def test_a_killed_controller_is_continued_to_the_same_numbers(site: Site, undisturbed: Path) -> None:
    grid = site.write_grid("killed")
    process = site.submit(grid)
    # Struck when one cell has committed some of its steps and the rest is still to come.
    wait_until(lambda: any(site.committed_step(grid, cell) >= 3 for cell in CELLS), process)
    controllers = job_processes(site.run_dir(grid))
    assert controllers
    for controller in controllers:
        controller.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    committed = {cell: site.committed_step(grid, cell) for cell in CELLS}
    assert any(step < CELLS[cell] for cell, step in committed.items()), "struck too late to show anything"

    code, output = site.finish(grid)
    assert code == 0, output
    for cell in CELLS:
        # A cell restarted from its commit has had two attempts; a finished one was left alone.
        expected_attempts = 1 if committed[cell] == CELLS[cell] else 2
        state = site.state(grid, cell)
        assert (state["state"], state["attempt"]) == ("finished", expected_attempts)
        assert without_measured(site.history(grid, cell)) == without_measured(site.history(undisturbed, cell))
    client = MlflowClient(site.services.mlflow_uri)
    experiment = client.get_experiment_by_name("killed")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1 + len(CELLS) and {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "avg_at_4")
        assert len({point.step for point in points}) == len(points)
    assert job_processes(site.run_dir(grid)) == []


def test_a_lost_engine_breaks_off_and_two_ranks_give_the_same_scores_at_first(
    site: Site, undisturbed: Path
) -> None:
    """Two FSDP ranks compute what one does, up to rounding, which sampling amplifies only later."""
    grid = site.write_grid("ranks", learners=1, ranks=2)
    process = site.submit(grid)
    first = next(iter(CELLS))
    wait_until(lambda: len(site.history(grid, first)) >= 1, process)
    (engine,) = engines_of(site)
    engine.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "broken off: an engine, learner or grader was lost" in output
    assert site.state(grid, first)["state"] == "paused"

    code, output = site.finish(grid)
    assert code == 0, output
    for cell in CELLS:
        one, two = site.history(undisturbed, cell), site.history(grid, cell)
        assert [row["compute_rollouts"] for row in two] == MARKS
        assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-4)
        assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-3)
        assert max(row["logprob_difference"] for row in two) < 1e-3


def test_a_grid_that_asks_for_more_than_the_cluster_is_refused_at_once(site: Site) -> None:
    grid = site.write_grid("greedy", learners=50)
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
        code, output = site.finish(undisturbed)
    finally:
        undisturbed.write_text(text)
    assert code == 2, output
    assert "optimiser.learning_rate: 0.0002 -> 0.0003" in output

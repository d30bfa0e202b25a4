"""What differs between a run that was struck and one that was not, and what a run has left behind."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.numpy import load_file

from benchmarks.site import ROOT, Site, cells_of, history, state
from orchestrator.pools.members import RUN_VARIABLE
from orchestrator.store.files import is_temporary

MEASURED = ("seconds_", "accelerator_seconds", "logged_at_ms")
"""Beginnings of the columns that tell of time, which no two runs share."""
GONE_SECONDS = 30.0
"""How long after a run's end its last processes may take to be gone."""
_ACTORS = """
import json, ray
from ray.util.state import list_actors
ray.init(log_to_driver=False, logging_level="ERROR")
groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
actors = [actor for actor in list_actors(limit=10_000) if actor.state != "DEAD"]
print(json.dumps([f"placement group {group['placement_group_id']} {group['state']}" for group in groups]
    + [f"actor {actor.class_name} {actor.actor_id} {actor.state}" for actor in actors]))
"""


def without_measured(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the columns that tell of time."""
    return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


def folder_differences(run_dir: Path, reference: Path) -> list[str]:
    """How a finished run folder differs from that of an undisturbed run of the same grid, in words; bits count."""
    found = []
    if cells_of(run_dir) != cells_of(reference):
        found.append(f"cells {cells_of(run_dir)}, expected {cells_of(reference)}")
    if base_row(run_dir) != base_row(reference):
        found.append("base.json differs")
    for cell in cells_of(reference):
        found += [f"{cell}: {difference}" for difference in _cell_differences(run_dir, reference, cell)]
    found += [
        f"temporary left: {path.relative_to(run_dir)}"
        for path in sorted(run_dir.rglob(".*"))
        if is_temporary(path.name)
    ]
    return found


def base_row(run_dir: Path) -> dict[str, Any] | None:
    """The base model's evaluation without what tells of time; None before there is one."""
    path = run_dir / "base.json"
    return without_measured(json.loads(path.read_text())) if path.exists() else None


def _cell_differences(run_dir: Path, reference: Path, cell: str) -> list[str]:
    found = []
    ended, expected = state(run_dir, cell), state(reference, cell)
    if ended.get("state") != "finished" or ended["commit"]["step"] != expected["commit"]["step"]:
        return [f"is {ended.get('state')}: {ended.get('reason')}"]
    if ended["deviations"]:
        found.append(f"deviations {ended['deviations']}")
    try:
        rows, wanted = history(run_dir, cell), history(reference, cell)
    except ValueError as error:
        return [*found, f"its history holds something else than rows: {error}"]
    if len(rows) != len(wanted):
        found.append(f"{len(rows)} rows, expected {len(wanted)}")
    for row, want in zip(rows, wanted, strict=False):
        columns = {
            name
            for name in without_measured(row | want)
            if name not in row or name not in want or row[name] != want[name]
        }
        if columns:
            found.append(f"row of step {want['step']} differs in {', '.join(sorted(columns))}")
    tensors, wanted_tensors = final_tensors(run_dir, cell), final_tensors(reference, cell)
    differing = [
        name
        for name in tensors.keys() | wanted_tensors.keys()
        if tensors.get(name) != wanted_tensors.get(name)
    ]
    if differing or not tensors:
        found.append(f"{len(differing)} of {len(wanted_tensors)} tensors differ")
    if _samples(run_dir, cell) != _samples(reference, cell):
        found.append("samples differ")
    return found


def final_tensors(run_dir: Path, cell: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor of model and optimiser in the last checkpoint."""
    checkpoint = run_dir / "cells" / cell / state(run_dir, cell)["commit"]["checkpoint"]
    return {
        name: (str(array.dtype), array.shape, array.tobytes())
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def _samples(run_dir: Path, cell: str) -> dict[str, bytes]:
    folder = run_dir / "cells" / cell / "samples"
    return {path.name: path.read_bytes() for path in folder.iterdir() if not is_temporary(path.name)}


def tracking_differences(uri: str, experiment_name: str, run_dir: Path) -> list[str]:
    """How an experiment differs from one parent run and one child for each cell, all finished, each point there once."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(experiment_name)
    if experiment is None:
        return [f"MLflow has no experiment {experiment_name}"]
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    found = [] if len(parents) == 1 else [f"MLflow: {len(parents)} parent runs"]
    found += [
        f"MLflow: run {run.info.run_name} is {run.info.status}"
        for run in runs
        if run.info.status != "FINISHED"
    ]
    children = sorted(run.data.tags.get("isocompute.cell", "?") for run in runs if run not in parents)
    if children != cells_of(run_dir):
        found.append(f"MLflow: runs of {children}, expected {cells_of(run_dir)}")
    for run in runs:
        if run not in parents:
            found += _point_differences(client, run, run_dir)
    return found


def _point_differences(client: MlflowClient, run: Run, run_dir: Path) -> list[str]:
    cell = run.data.tags.get("isocompute.cell", "?")
    base = json.loads((run_dir / "base.json").read_text())
    rows = [base, *history(run_dir, cell)]
    found = []
    for metric in run.data.metrics:
        steps = [point.step for point in client.get_metric_history(run.info.run_id, metric)]
        if len(set(steps)) != len(steps):
            found.append(f"MLflow: {cell}, {metric}: a point is there twice")
        if not set(steps) <= {row["compute_rollouts"] for row in rows}:
            found.append(f"MLflow: {cell}, {metric}: a point of no row")
    scores = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "avg_at_4")]
    if sorted(scores) != [(row["compute_rollouts"], row["avg_at_4"]) for row in rows]:
        found.append(f"MLflow: {cell}: {len(scores)} scores are not those of {len(rows)} rows")
    return found


def leftovers(site: Site, run_dir: Path) -> list[str]:
    """Processes of a run that has ended, and actors and placement groups on the cluster, once they had time to go."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        found = processes_of(run_dir) + cluster_leftovers(site)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def processes_of(run_dir: Path) -> list[str]:
    """Processes that serve a run: they have its folder in their environment or on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            serves = process.environ().get(RUN_VARIABLE) == str(run_dir) or str(run_dir) in line
            if serves and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} {' '.join(line)[:80]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def cluster_leftovers(site: Site) -> list[str]:
    """Living actors and placement groups of the site's cluster, which serves nobody else."""
    asked = subprocess.run(
        [sys.executable, "-c", _ACTORS],
        env=site.environment("direct"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if asked.returncode != 0:
        return [f"the cluster does not tell: {asked.stderr.strip().splitlines()[-1]}"]
    found: list[str] = json.loads(asked.stdout.strip().splitlines()[-1])
    return found

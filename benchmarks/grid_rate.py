"""How fast a real grid trains on this machine: Ray, vLLM, FSDP, MLflow, from the first cell's start to the last one's end."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.site import QUICKSTART, Site
from grids.errors import UserError
from grids.expansion import expand
from grids.loading import dump_grid, load_grid
from grids.spec import GridSpec
from orchestrator.store.run_store import RunStore, State

LOGICAL_CPUS = 4
"""As in the quickstart: engine, learners and grader share the machine's cores."""


@dataclass(frozen=True)
class GridRate:
    """What one grid took. Times are in seconds."""

    seconds: float
    """From the start of the first cell's attempt to the end of the last one's, final evaluations and commits included."""
    rollouts: int
    """Training rollouts of all cells."""
    start_up_seconds: float
    """From the submission to the start of the first attempt."""
    batch_rollouts: int
    """B, of every cell."""
    sampling_seconds: float
    """Mean of a step, inside the engine."""
    learning_seconds: float
    """Mean of a step, inside the learner."""
    train_reward: float
    response_tokens: float
    zero_variance: float
    """Share of groups whose rewards are all equal."""

    @property
    def rollouts_per_second(self) -> float:
        return self.rollouts / self.seconds

    @property
    def core_seconds_per_rollout(self) -> float:
        """Of both phases together, with one core for an engine and one for a learner."""
        return (self.sampling_seconds + self.learning_seconds) / self.batch_rollouts


def quickstart_with(changes: dict[str, Any]) -> GridSpec:
    """The quickstart's grid with some of its sections replaced."""
    return GridSpec.model_validate(dump_grid(load_grid(QUICKSTART.with_suffix(".yaml"))) | changes)


def measure_grid(site: Site, spec: GridSpec, timeout: float) -> GridRate:
    """Run a grid of cells of one batch size as a Ray job of a site.

    Args:
        spec: each cell's only compute mark is its end, so that the one row of its history tells of all its steps.
        timeout: in seconds, for the whole job.

    Raises:
        UserError: the job took too long or failed, or a cell did not finish at its first try.
    """
    tracking = {"mlflow_uri": site.mlflow_uri}
    path = site.folder / f"{spec.name}.yaml"
    path.write_text(json.dumps(dump_grid(spec) | {"tracking": tracking}))
    submitted_at = time.time()
    run_dir = site.run_dir(path)
    try:
        code, output = site.finish(path, timeout)
    except subprocess.TimeoutExpired:
        raise UserError(f"{run_dir}: not done after {timeout:.0f} s; take fewer cells or steps") from None
    if code != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{run_dir}: the grid ended with exit code {code}: {last}")
    return read_rate(run_dir, spec, submitted_at)


def read_rate(run_dir: Path, spec: GridSpec, submitted_at: float) -> GridRate:
    """The rate of a finished run from its folder.

    Raises:
        UserError: a cell did not finish, or not at its first try.
    """
    store = RunStore.existing(run_dir)
    cells = expand(spec)
    started, ended, rows = [], [], []
    for cell in cells:
        kept = store.cell(cell.id)
        attempts, history = kept.attempts(), kept.rows()
        if kept.read().state is not State.FINISHED or len(attempts) != 1 or attempts[0].ended_at is None:
            raise UserError(
                f"{run_dir}: {cell.id} did not finish at its first try, so the grid has no fair time; run it again"
            )
        if len(history) != 1:
            raise UserError(
                f"{run_dir}: {cell.id} has {len(history)} history rows; evaluation.first_mark must be its C"
            )
        started.append(attempts[0].started_at)
        ended.append(attempts[0].ended_at)
        rows.append(history[0])

    def mean(*columns: str) -> float:
        return fmean(sum(row[column] for column in columns) for row in rows)

    return GridRate(
        seconds=max(ended) - min(started),
        rollouts=sum(row["compute_rollouts"] for row in rows),
        start_up_seconds=min(started) - submitted_at,
        batch_rollouts=cells[0].batch_rollouts,
        sampling_seconds=mean("seconds_sampling"),
        learning_seconds=mean("seconds_learning"),
        train_reward=mean("train_reward"),
        response_tokens=mean("response_tokens"),
        zero_variance=mean("zero_variance_right", "zero_variance_wrong"),
    )

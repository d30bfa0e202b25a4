"""A grid's tables from its MLflow experiment: the same numbers as from the run folder.

MLflow keeps the first value of a point. After a crash a cell may write rows again that MLflow had already; their
measured columns (``seconds_*``, ``accelerator_seconds``, ``logged_at_ms``) are then those of the first time.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from analysis.reading.sources import build_tables, merge_settings, setting_of
from analysis.tables import GridTables, column_rank
from grids.errors import UserError
from orchestrator.tracking.mlflow_client import CONNECT_SECONDS, asking, find_experiment
from orchestrator.tracking.mlflow_format import (
    CELL_TAG,
    GRID_FILE,
    PER_PROBLEM_FILE,
    REASON_TAG,
    RUN_TAG,
    STATE_TAG,
    STEP_COLUMN,
    TIME_COLUMN,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

INTEGER_COLUMNS = (
    "problems_per_batch",
    "rollouts_per_problem",
    "seed",
    "step",
    "compute_rollouts",
    "compute_tokens",
)
"""Columns that are integers in a history; MLflow keeps every metric as a double, which holds integers below 2^53 exactly."""

BULK_PATH = "/ajax-api/2.0/mlflow/metrics/get-history-bulk"
"""One metric of many runs in one request, which the server's own pages use; exact, unlike the sampled intervals."""
RUNS_PER_REQUEST = 100
POINTS_PER_REQUEST = 25_000
READ_SECONDS = 60
THREADS = 8

Rows = dict[str, list[dict[str, Any]]]
"""By MLflow run id, in order of compute."""


def read_experiment(uri: str, experiment: str) -> list[GridTables]:
    """Tables of every setting in an experiment, as ``analysis.reading.sources.read_sources`` gives them for run folders.

    Args:
        uri: the tracking server, ``http://host:port``.
        experiment: its name: the grid's.

    Raises:
        UserError: the server does not answer or refuses, or there is no such experiment, or no grid in it.
    """
    with asking(uri, "--mlflow-uri", CONNECT_SECONDS) as client:
        found = find_experiment(client, uri, experiment)
        if found is None:
            raise UserError(
                f"mlflow:{experiment}: {uri} has no such experiment; an experiment has the name of its grid"
            )
    with asking(uri, "--mlflow-uri", READ_SECONDS) as client:
        runs = _runs(client, found.experiment_id)
        parents = {run.data.tags[RUN_TAG]: run for run in runs if CELL_TAG not in run.data.tags}
        if not parents:
            raise UserError(
                f"mlflow:{experiment}: holds no grid; give an experiment that `isocompute run` wrote"
            )
        children: dict[str, dict[str, Run]] = {key: {} for key in parents}
        for run in runs:
            key = run.data.tags[RUN_TAG]
            if CELL_TAG in run.data.tags and key in parents:
                children[key].setdefault(run.data.tags[CELL_TAG], run)
        cells = [run for of_parent in children.values() for run in of_parent.values()]
        rows = _rows(uri, cells)
        grids = _files(client, parents.values(), GRID_FILE)
        scores = _files(client, cells, PER_PROBLEM_FILE)
    for run_id, text in scores.items():
        _add_scores(rows[run_id], text)
    parts = []
    for key, parent in parents.items():
        grid = yaml.safe_load(grids.get(parent.info.run_id, "null"))
        parts.append((setting_of(grid), _tables(parent, children[key], rows, grid)))
    return merge_settings(parts)


def _tables(parent: "Run", children: "dict[str, Run]", rows: Rows, grid: dict[str, Any] | None) -> GridTables:
    """Tables of one run folder; the rows at C = 0 are the base model's, the same in every child."""
    of_cells, base = {}, None
    for cell, run in children.items():
        cell_rows = rows[run.info.run_id]
        base = base or next((row for row in cell_rows if row[STEP_COLUMN] == 0), None)
        of_cells[cell] = [{"cell": cell} | row for row in cell_rows if row[STEP_COLUMN] > 0]
    tags = {cell: run.data.tags for cell, run in children.items()}
    return build_tables(
        parent.info.run_name,
        of_cells,
        base,
        {cell: found[STATE_TAG] for cell, found in tags.items() if STATE_TAG in found},
        {cell: found[REASON_TAG] for cell, found in tags.items() if REASON_TAG in found},
        grid["resolved"]["spec"] if grid else None,
    )


def _runs(client: "MlflowClient", experiment_id: str) -> "list[Run]":
    """All runs of grids that are not deleted, oldest first."""
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id],
            f"tags.`{RUN_TAG}` != ''",
            order_by=["attributes.start_time ASC"],
            max_results=1000,
            page_token=token,
        )
        runs += page
        token = page.token
        if not token:
            return runs


def _rows(uri: str, runs: "Sequence[Run]") -> Rows:
    """The history columns of runs, from their metrics."""
    ids_of: defaultdict[str, list[str]] = defaultdict(list)
    for run in runs:
        for name in run.data.metrics:
            if column_rank(name) is not None:
                ids_of[name].append(run.info.run_id)
    requests = [
        (name, ids[start : start + RUNS_PER_REQUEST])
        for name, ids in ids_of.items()
        for start in range(0, len(ids), RUNS_PER_REQUEST)
    ]
    by_step: dict[str, dict[int, dict[str, Any]]] = {run.info.run_id: defaultdict(dict) for run in runs}
    with ThreadPoolExecutor(THREADS) as threads:
        for points in threads.map(lambda request: _points(uri, *request), requests):
            for point in points:
                name, value = point["key"], point["value"]
                row = by_step[point["run_id"]][point["step"]]
                row[name] = int(value) if name in INTEGER_COLUMNS else value
                row[TIME_COLUMN] = point["timestamp"]
    # A step without its last metric is a row that was cut off while it was sent.
    return {
        run_id: [rows[step] for step in sorted(rows) if STEP_COLUMN in rows[step]]
        for run_id, rows in by_step.items()
    }


def _points(uri: str, metric: str, run_ids: list[str]) -> list[dict[str, Any]]:
    """All points (``run_id``, ``key``, ``step``, ``value``, ``timestamp``) of one metric in several runs."""
    from mlflow import MlflowClient
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    query = {"run_id": run_ids, "metric_key": metric, "max_results": POINTS_PER_REQUEST}
    response = http_request(get_default_host_creds(uri), BULK_PATH, "GET", params=query)
    points: list[dict[str, Any]] = verify_rest_response(response, BULK_PATH).json()["metrics"]
    if len(points) < POINTS_PER_REQUEST:
        return points
    # The answer was cut at the server's limit.
    if len(run_ids) > 1:
        half = len(run_ids) // 2
        return _points(uri, metric, run_ids[:half]) + _points(uri, metric, run_ids[half:])
    history = MlflowClient(tracking_uri=uri).get_metric_history(run_ids[0], metric)
    return [dict(point) | {"run_id": run_ids[0]} for point in history]


def _files(client: "MlflowClient", runs: "Iterable[Run]", name: str) -> dict[str, str]:
    """Content of an artifact by run id, for the runs that have it."""

    def content(run_id: str) -> str | None:
        if all(file.path != name for file in client.list_artifacts(run_id)):
            return None
        with tempfile.TemporaryDirectory() as folder:
            return Path(client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")

    ids = [run.info.run_id for run in runs]
    read: Callable[[str], str | None] = content
    with ThreadPoolExecutor(THREADS) as threads:
        texts = threads.map(read, ids)
        return {run_id: text for run_id, text in zip(ids, texts, strict=True) if text is not None}


def _add_scores(rows: list[dict[str, Any]], text: str) -> None:
    """Give rows their per-problem columns, by compute."""
    scores = {line.pop(STEP_COLUMN): line for line in map(json.loads, text.splitlines())}
    for row in rows:
        row |= scores.get(row[STEP_COLUMN], {})

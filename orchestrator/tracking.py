"""A grid in MLflow: one parent run per run folder, one child run per cell, MLflow's step = compute_rollouts.

MLflow is a view. The durable copy of every row is the cell's history.jsonl: offering committed rows again is
always right, because steps that MLflow already has are skipped. A value that is NaN or infinite is not sent:
the chart has a gap there, and the history keeps the value. Scores for each problem are no metrics; a file of
the cell's run, sent when the cell ends, holds them.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestrator.mlflow_client import CONNECT_SECONDS, asking, find_or_create_experiment
from orchestrator.mlflow_format import (
    CELL_TAG,
    PARENT_TAG,
    PER_PROBLEM_COLUMNS,
    PER_PROBLEM_FILE,
    REASON_TAG,
    RUN_TAG,
    STATE_TAG,
    STEP_COLUMN,
    TIME_COLUMN,
    Row,
    RunStatus,
    flat_params,
    is_transient,
    metrics_of,
    mlflow_status,
    per_problem_text,
    quoted,
    shortened,
)
from orchestrator.outbox import Outbox

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

METRICS_PER_REQUEST = 1000
PARAMS_PER_REQUEST = 100
LONGEST_TAG = 5000


class Tracker:
    """Writes one run folder's grid to MLflow. All methods but ``connect`` and ``close`` return at once: a
    background thread does the requests, in order, and repeats them while the server is away. None raises for
    what the server does. Make one with ``connect``.
    """

    def __init__(
        self, client: "MlflowClient", uri: str, experiment_id: str, run_key: str, run_name: str
    ) -> None:
        self.uri = uri
        self.experiment_id = experiment_id
        self._client = client
        self._run_key = run_key
        self.parent_run_id = self._find_or_create_parent(run_name)
        self._lock = threading.Lock()
        self._pending: defaultdict[str, list[Row]] = defaultdict(list)
        self._per_problem: defaultdict[str, list[Row]] = defaultdict(list)
        self._refused_rows = 0
        self._run_ids: dict[str, str] = {}  # of the cells opened by this process; background thread only
        self._steps: dict[str, set[int]] = {}  # that MLflow already has; background thread only
        self._outbox = Outbox("mlflow-tracker", is_transient)

    @classmethod
    def connect(cls, uri: str, experiment: str, run_key: str, run_name: str) -> Self:
        """Finds or makes the experiment and the run folder's parent run.

        Args:
            uri: the tracking server, ``http://host:port``.
            experiment: the grid's name.
            run_key: a stable id of the run folder; the same key continues the same runs.
            run_name: the parent run's name in MLflow's pages.

        Raises:
            UserError: the server does not answer within about 10 s, or refuses.
        """
        with asking(uri, "tracking.mlflow_uri", CONNECT_SECONDS) as client:
            found = find_or_create_experiment(client, uri, experiment)
            return cls(client, uri, found.experiment_id, run_key, run_name)

    @property
    def url(self) -> str:
        """The parent run's page."""
        return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.parent_run_id}"

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Marks the parent run as running and gives it the grid's settings."""

        def open_parent() -> None:
            self._client.update_run(self.parent_run_id, status="RUNNING")
            self._log_params(self.parent_run_id, params, tags)

        self._outbox.put("opening the grid's run", open_parent)

    def reconcile(self, states: Mapping[str, str]) -> None:
        """Gives runs that a killed controller left RUNNING the status of their cell's state.

        A state that is no end (running, pending) becomes ``interrupted``. Call it before ``cell_started``.
        """
        self._outbox.put("reconciling runs", lambda: self._reconcile(states))

    def cell_started(self, cell_id: str, params: Mapping[str, Any]) -> None:
        """Opens the cell's run, or opens it again and notes which steps it has."""

        def open_cell() -> None:
            run_id = self._open_cell(cell_id, params)
            self._client.update_run(run_id, status="RUNNING")
            self._tag_state(self._client.get_run(run_id), "running", None)

        self._outbox.put(f"opening the run of {cell_id}", open_cell)

    def row(self, cell_id: str, row: Row) -> None:
        """Sends one history row of a started cell, unless MLflow has its ``compute_rollouts`` already.

        ``logged_at_ms`` (an int, milliseconds since the epoch) becomes the metrics' time.
        """
        with self._lock:
            self._pending[cell_id].append(dict(row))
            if any(name in row for name in PER_PROBLEM_COLUMNS):
                self._per_problem[cell_id].append(row)
        self._outbox.put(
            f"sending rows of {cell_id}", lambda: self._send_rows(cell_id), lambda: self._refuse_rows(cell_id)
        )

    def cell_ended(self, cell_id: str, state: str, reason: str | None = None) -> None:
        """Ends the cell's run now, with the status of ``state`` and the scores for each problem of all its rows."""
        self._end_cell(cell_id, state, reason, None)

    def restore(
        self,
        cell_id: str,
        params: Mapping[str, Any],
        rows: Sequence[Row],
        state: str,
        reason: str | None = None,
    ) -> None:
        """Completes the run of a cell that ended in an earlier process: rows, per-problem scores and status that
        never arrived. A complete one stays as it is; a changed one ends at its last row's time.
        """
        self._outbox.put(f"restoring the run of {cell_id}", lambda: self._open_cell(cell_id, params))
        for row in rows:
            self.row(cell_id, row)
        self._end_cell(cell_id, state, reason, max((row[TIME_COLUMN] for row in rows), default=None))

    def artifacts(self, path: Path) -> None:
        """Logs a file, or a folder's files under the folder's name, to the parent run."""

        def log() -> None:
            if path.is_dir():
                self._client.log_artifacts(self.parent_run_id, str(path), artifact_path=path.name)
            else:
                self._client.log_artifact(self.parent_run_id, str(path))

        self._outbox.put(f"logging {path}", log)

    def close(self, status: RunStatus | None, timeout: float) -> int:
        """Ends the parent run (None: leaves it as it is) and waits at most ``timeout`` seconds for all to be sent.

        Returns the number of rows that could not be sent; the next start sends those that the server did not
        refuse.
        """
        if status is not None:
            self._outbox.put(
                "ending the grid's run", lambda: self._client.set_terminated(self.parent_run_id, status)
            )
        self._outbox.close(timeout)
        with self._lock:
            return self._refused_rows + sum(len(rows) for rows in self._pending.values())

    def _find_or_create_parent(self, run_name: str) -> str:
        parents = [run for run in self._search() if CELL_TAG not in run.data.tags]
        if parents:
            return str(parents[0].info.run_id)
        tags = {RUN_TAG: self._run_key}
        return str(self._client.create_run(self.experiment_id, tags=tags, run_name=run_name).info.run_id)

    def _search(self, condition: str = "") -> "list[Run]":
        """This run folder's runs, parent and children, oldest first."""
        return list(
            self._client.search_runs(
                [self.experiment_id],
                f"tags.`{RUN_TAG}` = {quoted(self._run_key)}{condition}",
                order_by=["attributes.start_time ASC"],
                max_results=10_000,
            )
        )

    def _open_cell(self, cell_id: str, params: Mapping[str, Any]) -> str:
        """Finds the cell's run before making one, so that a repeated request makes no second run."""
        runs = self._search(f" AND tags.`{CELL_TAG}` = {quoted(cell_id)}")
        tags = {PARENT_TAG: self.parent_run_id, RUN_TAG: self._run_key, CELL_TAG: cell_id}
        run = runs[0] if runs else self._client.create_run(self.experiment_id, tags=tags, run_name=cell_id)
        run_id = str(run.info.run_id)
        # The parent is another one when somebody deleted the earlier parent.
        changed = (
            {PARENT_TAG: self.parent_run_id} if run.data.tags.get(PARENT_TAG) != self.parent_run_id else {}
        )
        self._log_params(run_id, params, changed)
        self._steps[cell_id] = {point.step for point in self._client.get_metric_history(run_id, STEP_COLUMN)}
        self._run_ids[cell_id] = run_id
        return run_id

    def _log_params(self, run_id: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        existing = self._client.get_run(run_id).data.params
        wanted = flat_params(params)
        changed = sorted(name for name, value in wanted.items() if existing.get(name, value) != value)
        if changed:
            logger.warning(
                "MLflow keeps the earlier values of %s: it lets no parameter change", ", ".join(changed)
            )
        new = [Param(name, value) for name, value in wanted.items() if name not in existing]
        new_tags = [RunTag(name, shortened(value, LONGEST_TAG)) for name, value in tags.items()]
        for start in range(0, max(len(new), len(new_tags)), PARAMS_PER_REQUEST):
            end = start + PARAMS_PER_REQUEST
            self._client.log_batch(run_id, params=new[start:end], tags=new_tags[start:end])

    def _send_rows(self, cell_id: str) -> None:
        """Sends all rows of the cell that wait, also those of later ``row`` calls (which then find none)."""
        from mlflow.entities import Metric

        with self._lock:
            rows = list(self._pending[cell_id])
        steps = self._steps[cell_id]
        metrics = []
        fresh: set[int] = set()
        for row in rows:
            step = int(row[STEP_COLUMN])
            if step not in steps | fresh:
                fresh.add(step)
                metrics += [Metric(name, value, row[TIME_COLUMN], step) for name, value in metrics_of(row)]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self._run_ids[cell_id], metrics[start : start + METRICS_PER_REQUEST])
        steps |= fresh
        with self._lock:
            del self._pending[cell_id][: len(rows)]

    def _refuse_rows(self, cell_id: str) -> None:
        with self._lock:
            self._refused_rows += len(self._pending.pop(cell_id, []))

    def _end_cell(self, cell_id: str, state: str, reason: str | None, ended_at_ms: int | None) -> None:
        with self._lock:
            scored = self._per_problem.pop(cell_id, [])

        def send_scores() -> None:
            self._client.log_text(self._run_ids[cell_id], per_problem_text(scored), PER_PROBLEM_FILE)

        def end() -> None:
            self._end_run(self._client.get_run(self._run_ids[cell_id]), state, reason, ended_at_ms)

        if scored:
            self._outbox.put(f"sending scores for each problem of {cell_id}", send_scores)
        self._outbox.put(f"ending the run of {cell_id}", end)

    def _end_run(self, run: "Run", state: str, reason: str | None, ended_at_ms: int | None) -> None:
        self._tag_state(run, state, reason)
        if run.info.status != mlflow_status(state):
            self._client.set_terminated(run.info.run_id, mlflow_status(state), ended_at_ms)

    def _tag_state(self, run: "Run", state: str, reason: str | None) -> None:
        run_id, tags = run.info.run_id, run.data.tags
        if tags.get(STATE_TAG) != state:
            self._client.set_tag(run_id, STATE_TAG, state)
        if reason and tags.get(REASON_TAG) != shortened(reason, LONGEST_TAG):
            self._client.set_tag(run_id, REASON_TAG, shortened(reason, LONGEST_TAG))
        if not reason and REASON_TAG in tags:
            self._client.delete_tag(run_id, REASON_TAG)

    def _reconcile(self, states: Mapping[str, str]) -> None:
        for run in self._search(" AND attributes.status = 'RUNNING'"):
            cell_id = run.data.tags.get(CELL_TAG)
            if cell_id is None or cell_id in self._run_ids:
                continue
            points = self._client.get_metric_history(run.info.run_id, STEP_COLUMN)
            last_sign_ms = max((point.timestamp for point in points), default=int(time.time() * 1000))
            state = states.get(cell_id, "interrupted")
            ended = {"finished", "failed", "diverged", "cancelled", "paused"}
            self._end_run(run, state if state in ended else "interrupted", None, last_sign_ms)

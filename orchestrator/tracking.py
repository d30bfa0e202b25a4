"""A grid in MLflow: one parent run per run folder, one child run per cell, MLflow's step = compute_rollouts.

MLflow is a view. The durable copy of every row is the cell's history.jsonl: offering committed rows again is
always right, because steps that MLflow already has are skipped. A value that is NaN or infinite is not sent:
the chart has a gap there, and the history keeps the value.
"""

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from requests import RequestException

from grids.errors import UserError
from orchestrator.mlflow_format import (
    STEP_COLUMN,
    TIME_COLUMN,
    Row,
    RunStatus,
    flat_params,
    is_transient,
    metrics_of,
    mlflow_status,
    quoted,
    shortened,
)
from orchestrator.outbox import Outbox, one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

logger = logging.getLogger(__name__)

RUN_TAG = "isocompute.run"
CELL_TAG = "isocompute.cell"
STATE_TAG = "isocompute.state"
PARENT_TAG = "mlflow.parentRunId"

METRICS_PER_REQUEST = 1000
PARAMS_PER_REQUEST = 100
LONGEST_TAG = 5000

# The Tracker repeats what fails, in order and for as long as it takes; a client that repeats by itself would
# hang for minutes inside one request. Telemetry, progress bars and links on stdout are not wanted here.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
CONNECT_TIMEOUT_SECONDS = "5"


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
        os.environ.update(CLIENT_ENVIRONMENT | {"MLFLOW_HTTP_REQUEST_TIMEOUT": CONNECT_TIMEOUT_SECONDS})
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            client = MlflowClient(tracking_uri=uri)
            found = _find_or_create_experiment(client, experiment)
            if found.lifecycle_stage == "deleted":
                raise UserError(
                    f"experiment {experiment!r} was deleted on {uri}: restore it (mlflow experiments restore "
                    f"--experiment-id {found.experiment_id}) or give the grid another name"
                )
            tracker = cls(client, uri, found.experiment_id, run_key, run_name)
        except (MlflowException, RequestException) as error:
            raise UserError(
                f"tracking.mlflow_uri: no usable MLflow server at {uri} ({one_line(error)}); "
                "start it or correct tracking.mlflow_uri"
            ) from error
        os.environ.update(CLIENT_ENVIRONMENT)
        return tracker

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
            self._client.set_tag(run_id, STATE_TAG, "running")

        self._outbox.put(f"opening the run of {cell_id}", open_cell)

    def row(self, cell_id: str, row: Row) -> None:
        """Sends one history row of a started cell, unless MLflow has its ``compute_rollouts`` already.

        ``logged_at_ms`` (an int, milliseconds since the epoch) becomes the metrics' time.
        """
        with self._lock:
            self._pending[cell_id].append(dict(row))
        self._outbox.put(
            f"sending rows of {cell_id}", lambda: self._send_rows(cell_id), lambda: self._refuse_rows(cell_id)
        )

    def cell_ended(self, cell_id: str, state: str) -> None:
        """Ends the cell's run now, with the status of ``state``."""
        self._outbox.put(f"ending the run of {cell_id}", lambda: self._end_cell(cell_id, state, None))

    def restore(self, cell_id: str, params: Mapping[str, Any], rows: Sequence[Row], state: str) -> None:
        """Completes the run of a cell that ended in an earlier process: rows and status that never arrived. A
        complete one is left untouched; a changed one ends at its last row's time.
        """
        self._outbox.put(f"restoring the run of {cell_id}", lambda: self._open_cell(cell_id, params))
        for row in rows:
            self.row(cell_id, row)
        ended_at_ms = max((row[TIME_COLUMN] for row in rows), default=None)
        self._outbox.put(f"ending the run of {cell_id}", lambda: self._end_cell(cell_id, state, ended_at_ms))

    def artifacts(self, folder: Path) -> None:
        """Logs a folder's files to the parent run, under the folder's name."""
        self._outbox.put(
            f"logging {folder}",
            lambda: self._client.log_artifacts(self.parent_run_id, str(folder), artifact_path=folder.name),
        )

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

    def _end_cell(self, cell_id: str, state: str, ended_at_ms: int | None) -> None:
        self._end_run(self._client.get_run(self._run_ids[cell_id]), state, ended_at_ms)

    def _end_run(self, run: "Run", state: str, ended_at_ms: int | None) -> None:
        if run.info.status == mlflow_status(state) and run.data.tags.get(STATE_TAG) == state:
            return
        self._client.set_tag(run.info.run_id, STATE_TAG, state)
        self._client.set_terminated(run.info.run_id, mlflow_status(state), ended_at_ms)

    def _reconcile(self, states: Mapping[str, str]) -> None:
        for run in self._search(" AND attributes.status = 'RUNNING'"):
            cell_id = run.data.tags.get(CELL_TAG)
            if cell_id is None or cell_id in self._run_ids:
                continue
            points = self._client.get_metric_history(run.info.run_id, STEP_COLUMN)
            last_sign_ms = max((point.timestamp for point in points), default=int(time.time() * 1000))
            state = states.get(cell_id, "interrupted")
            ended = {"finished", "failed", "diverged", "cancelled", "paused"}
            self._end_run(run, state if state in ended else "interrupted", last_sign_ms)


def _find_or_create_experiment(client: "MlflowClient", name: str) -> "Experiment":
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            client.create_experiment(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another starter was faster
                raise
        found = client.get_experiment_by_name(name)
    if found is None:
        raise UserError(f"experiment {name!r} was made on the MLflow server but cannot be found there")
    return found

"""Requests about one run folder's runs in MLflow. Each is safe to repeat, and none waits for a server that is away."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.store.lease import LeaseLost
from orchestrator.tracking.ledger import Home
from orchestrator.tracking.mlflow_client import find_or_create_experiment
from orchestrator.tracking.mlflow_format import (
    CELL_TAG,
    ENDED_STATES,
    PARENT_TAG,
    REASON_TAG,
    RUN_TAG,
    STATE_TAG,
    STEP_COLUMN,
    TIME_COLUMN,
    Row,
    RunStatus,
    dotted_name,
    flat_params,
    metrics_of,
    mlflow_status,
    quoted,
    shortened,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

METRICS_PER_REQUEST = 500
PARAMS_PER_REQUEST = 100
LONGEST_TAG = 5000


@dataclass
class CellRun:
    """A cell's run as MLflow had it last; ``steps`` are those of the rows it has."""

    run_id: str
    status: str
    tags: dict[str, str]
    steps: set[int] = field(default_factory=set)


class GridRuns:
    """The parent run of a run folder and its cells' runs.

    Args:
        run_key: a stable id of the run folder; the same key finds the same runs.
        check: raises LeaseLost once another controller works on the run folder.
    """

    def __init__(
        self, client: "MlflowClient", experiment_id: str, run_key: str, check: Callable[[], None]
    ) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._run_key = run_key
        self._check = check

    def parent(self, run_name: str, known: str | None) -> str:
        """The id of the parent run, made when there is none; ``known`` where several are found."""
        run = self._find_or_create(f"tags.`{CELL_TAG}` IS NULL", {RUN_TAG: self._run_key}, run_name, known)
        return str(run.info.run_id)

    def open_cell(self, cell_id: str, parent_run_id: str, params: Mapping[str, Any]) -> CellRun:
        """The cell's run, made when there is none, with its parameters and the steps that it has."""
        tags = {RUN_TAG: self._run_key, CELL_TAG: cell_id, PARENT_TAG: parent_run_id}
        run = self._find_or_create(f"tags.`{CELL_TAG}` = {quoted(cell_id)}", tags, cell_id)
        run_id = str(run.info.run_id)
        # The parent is another one when somebody deleted the earlier parent.
        changed = {PARENT_TAG: parent_run_id} if run.data.tags.get(PARENT_TAG) != parent_run_id else {}
        self._log_params(run, params, changed)
        points = self._client.get_metric_history(run_id, STEP_COLUMN) if run.data.metrics else []
        return CellRun(run_id, run.info.status, dict(run.data.tags), {point.step for point in points})

    def open_parent(self, run_id: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Marks the parent run as running and gives it parameters and tags."""
        self._client.update_run(run_id, status="RUNNING")
        named = {dotted_name(name.split(".")): value for name, value in tags.items()}
        self._log_params(self._client.get_run(run_id), params, named)

    def end_parent(self, run_id: str, status: RunStatus) -> None:
        self._client.set_terminated(run_id, status)

    def resume(self, run: CellRun) -> None:
        """Marks a cell's run as running."""
        if run.status != "RUNNING":
            self._client.update_run(run.run_id, status="RUNNING")
            run.status = "RUNNING"
        self.tag_state(run, "running", None)

    def send(self, run: CellRun, rows: Iterable[Row]) -> None:
        """Sends the rows whose steps the run has not. Each row travels whole in one request, which MLflow takes or
        leaves: a request that is cut off leaves no part of a row.
        """
        from mlflow.entities import Metric

        batch: list[Metric] = []
        steps: set[int] = set()
        for row in rows:
            step = int(row[STEP_COLUMN])
            if step in run.steps | steps:
                continue
            metrics = [Metric(name, value, row[TIME_COLUMN], step) for name, value in metrics_of(row)]
            if len(batch) + len(metrics) > METRICS_PER_REQUEST:
                self._send_batch(run, batch, steps)
                batch, steps = [], set()
            batch += metrics
            steps.add(step)
        self._send_batch(run, batch, steps)

    def send_figures(self, run_id: str, values: Mapping[str, float], step: int, at_ms: int) -> None:
        """Sends metrics of one moment, under the names that they have."""
        from mlflow.entities import Metric

        self._client.log_batch(run_id, [Metric(name, value, at_ms, step) for name, value in values.items()])

    def tag_state(self, run: CellRun, state: str, reason: str | None) -> None:
        """Says the cell's state, and its reason or that there is none."""
        from mlflow.entities import RunTag

        wanted = {STATE_TAG: state} | ({REASON_TAG: shortened(reason, LONGEST_TAG)} if reason else {})
        changed = {name: value for name, value in wanted.items() if run.tags.get(name) != value}
        if changed:
            self._client.log_batch(run.run_id, tags=[RunTag(name, value) for name, value in changed.items()])
            run.tags |= changed
        if not reason and REASON_TAG in run.tags:
            self._client.delete_tag(run.run_id, REASON_TAG)
            del run.tags[REASON_TAG]

    def end(self, run: CellRun, state: str, reason: str | None, ended_at_ms: int | None) -> None:
        """Ends a cell's run with the status of ``state``, now unless a time is given."""
        self.tag_state(run, state, reason)
        if run.status != mlflow_status(state):
            self._client.set_terminated(run.run_id, mlflow_status(state), ended_at_ms)
            run.status = mlflow_status(state)

    def reconcile(self, states: Mapping[str, str], but: Iterable[str]) -> None:
        """Ends the runs left RUNNING of all cells ``but`` those, at their last rows' times."""
        excepted = set(but)
        for found in self._search("attributes.status = 'RUNNING'"):
            cell_id = found.data.tags.get(CELL_TAG)
            if cell_id is None or cell_id in excepted:
                continue
            points = self._client.get_metric_history(found.info.run_id, STEP_COLUMN)
            last_sign_ms = max((point.timestamp for point in points), default=int(time.time() * 1000))
            state = states.get(cell_id, "interrupted")
            run = CellRun(str(found.info.run_id), found.info.status, dict(found.data.tags))
            self.end(run, state if state in ENDED_STATES else "interrupted", None, last_sign_ms)

    def _send_batch(self, run: CellRun, metrics: Sequence[Any], steps: set[int]) -> None:
        # A row of more metrics than MLflow takes at once is cut; its step column, the last one, tells that it is whole.
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(run.run_id, metrics[start : start + METRICS_PER_REQUEST])
        run.steps |= steps

    def _log_params(self, run: "Run", params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        existing, wanted = run.data.params, flat_params(params)
        changed = sorted(name for name, value in wanted.items() if existing.get(name, value) != value)
        if changed:
            logger.warning(
                "MLflow keeps the earlier values of %s: it lets no parameter change", ", ".join(changed)
            )
        new = [Param(name, value) for name, value in wanted.items() if name not in existing]
        new_tags = [RunTag(name, shortened(value, LONGEST_TAG)) for name, value in tags.items()]
        for start in range(0, max(len(new), len(new_tags)), PARAMS_PER_REQUEST):
            end = start + PARAMS_PER_REQUEST
            self._client.log_batch(run.info.run_id, params=new[start:end], tags=new_tags[start:end])

    def _search(self, condition: str) -> "list[Run]":
        """This run folder's runs that meet a condition, oldest first."""
        return list(
            self._client.search_runs(
                [self._experiment_id],
                f"tags.`{RUN_TAG}` = {quoted(self._run_key)} AND {condition}",
                order_by=["attributes.start_time ASC"],
                max_results=10_000,
            )
        )

    def _find_or_create(
        self, condition: str, tags: dict[str, str], run_name: str, known: str | None = None
    ) -> "Run":
        """The one run that meets a condition, so that a repeated request makes no second one.

        A controller that is overtaken while its request is under way may still make a run beside its successor's.
        Each looks again after it has made one: the holder of the lease keeps its own and removes the other, the
        overtaken one removes its own where there is another.

        Raises:
            LeaseLost: another controller has taken over.
        """
        found = self._search(condition)
        if found:
            return next((run for run in found if run.info.run_id == known), found[0])
        self._check()
        made = self._client.create_run(self._experiment_id, tags=tags, run_name=run_name)
        rivals = [run for run in self._search(condition) if run.info.run_id != made.info.run_id]
        try:
            self._check()
        except LeaseLost:
            if rivals:
                self._client.delete_run(made.info.run_id)
            raise
        for rival in rivals:
            self._client.delete_run(rival.info.run_id)
        return made


def find_home(
    client: "MlflowClient",
    uri: str,
    experiment: str,
    run_key: str,
    run_name: str,
    known: Home | None,
    check: Callable[[], None],
) -> Home:
    """Finds or makes the experiment and the parent run; ``known`` is where they were.

    Raises:
        UserError: the experiment was deleted, or another controller has taken over.
    """
    found = find_or_create_experiment(client, uri, experiment)
    runs = GridRuns(client, found.experiment_id, run_key, check)
    parent = runs.parent(run_name, known.parent_run_id if known else None)
    return Home(uri, experiment, found.experiment_id, parent)

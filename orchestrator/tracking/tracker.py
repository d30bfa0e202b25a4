"""A grid in MLflow: one parent run per run folder, one child run per cell, MLflow's step = compute_rollouts.

MLflow is a view. The durable copy of every row is the cell's history.jsonl: offering committed rows again is
always right, because steps that MLflow already has are skipped. A value that is NaN or infinite is not sent:
the chart has a gap there, and the history keeps the value. Scores for each problem are no metrics; a file of
the cell's run, sent when the cell ends, holds them.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestrator.store.lease import LeaseLost
from orchestrator.tracking.ledger import Delivered, Home, Ledger
from orchestrator.tracking.mlflow_client import CONNECT_SECONDS, ServerAway, asking
from orchestrator.tracking.mlflow_format import (
    ENDED_STATES,
    PER_PROBLEM_COLUMNS,
    PER_PROBLEM_FILE,
    STEP_COLUMN,
    TIME_COLUMN,
    Row,
    RunStatus,
    is_transient,
    per_problem_text,
)
from orchestrator.tracking.outbox import Outbox
from orchestrator.tracking.runs import CellRun, GridRuns, find_home

if TYPE_CHECKING:
    from mlflow import MlflowClient

ROWS_AT_ONCE = 10
"""Rows of a request; a slow server must be able to take them within the request's time limit."""


@dataclass
class _Attempt:
    """What one ``cell_started`` .. ``cell_ended`` was given. ``lost``: the server refused a part of it."""

    steps: set[int] = field(default_factory=set)
    scores: dict[int, Row] = field(default_factory=dict)
    lost: bool = False


class Tracker:
    """Writes one run folder's grid to MLflow. All methods but ``connect`` and ``close`` return at once: a
    background thread does the requests, in order, and repeats them while the server is away. None raises for
    what the server does. A tracker whose lease is lost sends nothing more. Make one with ``connect``.
    """

    def __init__(
        self,
        client: "MlflowClient",
        home: Home,
        run_key: str,
        run_name: str,
        ledger: Ledger,
        away: str | None = None,
    ) -> None:
        self.away = away
        """Why the server could not be asked at the start, on one line; None where it answered."""
        self._client = client
        self._home = home
        self._ledger = ledger
        self._lock = threading.Lock()
        self._pending: defaultdict[str, list[Row]] = defaultdict(list)
        self._unrestored: dict[str, int] = {}  # rows of each cell that ``restore`` has still to send
        self._refused_rows = 0
        self._attempts: dict[str, _Attempt] = {}
        self._cell_runs: dict[str, CellRun] = {}  # opened by this process; background thread only
        self._runs = GridRuns(client, home.experiment_id, run_key, ledger.check)
        self._outbox = Outbox("mlflow-tracker", is_transient, self._holds_lease)
        if away is None:
            ledger.settle(home)
        else:
            self._outbox.put("finding the grid's run", lambda: self._find_home(run_key, run_name))

    @classmethod
    def connect(
        cls, uri: str, experiment: str, run_key: str, run_name: str, ledger: Ledger | None = None
    ) -> Self:
        """Finds or makes the experiment and the run folder's parent run.

        A server that is away is no hindrance where the ledger knows them from an earlier start: ``away`` then says
        so, and everything is sent later.

        Args:
            uri: the tracking server, ``http://host:port``.
            experiment: the grid's name.
            run_key: a stable id of the run folder; the same key continues the same runs.
            run_name: the parent run's name in MLflow's pages.
            ledger: what MLflow has confirmed to earlier starts; None where nothing is kept on disk.

        Raises:
            UserError: the server does not answer within about 10 s on the folder's first start or at a changed
                address, or it refuses, or another controller has taken over.
        """
        ledger = ledger or Ledger()
        known = ledger.home
        if known is not None and (known.uri, known.experiment) != (uri, experiment):
            known = None
        home, away = known, None
        try:
            with asking(uri, "tracking.mlflow_uri", CONNECT_SECONDS) as client:
                home = find_home(client, uri, experiment, run_key, run_name, known, ledger.check)
        except ServerAway as error:
            if home is None:
                raise
            away = f"MLflow at {uri} is away; rows are sent when it is back ({error})"
        return cls(client, home, run_key, run_name, ledger, away)

    @property
    def uri(self) -> str:
        """The server's address."""
        return self._home.uri

    @property
    def experiment_id(self) -> str:
        return self._home.experiment_id

    @property
    def parent_run_id(self) -> str:
        return self._home.parent_run_id

    @property
    def url(self) -> str:
        """The parent run's page."""
        return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.parent_run_id}"

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Marks the parent run as running and gives it the grid's settings."""
        self._outbox.put(
            "opening the grid's run", lambda: self._runs.open_parent(self.parent_run_id, params, tags)
        )

    def reconcile(self, states: Mapping[str, str]) -> None:
        """Gives runs that a killed controller left RUNNING the status of their cell's state.

        A state that is no end (running, pending) becomes ``interrupted``. Call it before ``cell_started``.
        """
        self._outbox.put("reconciling runs", lambda: self._runs.reconcile(states, self._cell_runs))

    def cell_started(self, cell_id: str, params: Mapping[str, Any]) -> None:
        """Opens the cell's run, or opens it again and notes which steps it has."""

        def open_cell() -> None:
            run = self._runs.open_cell(cell_id, self.parent_run_id, params)
            self._runs.resume(run)
            self._cell_runs[cell_id] = run
            self._ledger.opened(cell_id)

        self._attempts[cell_id] = _Attempt()
        self._put(f"opening the run of {cell_id}", cell_id, open_cell)

    def row(self, cell_id: str, row: Row) -> None:
        """Sends one history row of a started cell, unless MLflow has its ``compute_rollouts`` already.

        ``logged_at_ms`` (an int, milliseconds since the epoch) becomes the metrics' time.
        """
        step = int(row[STEP_COLUMN])
        attempt = self._attempts[cell_id]
        attempt.steps.add(step)
        if scores := _scores(row):
            attempt.scores[step] = scores
        with self._lock:
            self._pending[cell_id].append(dict(row))

        def refuse() -> None:
            with self._lock:
                self._refused_rows += len(self._pending.pop(cell_id, []))

        self._put(f"sending rows of {cell_id}", cell_id, lambda: self._send_rows(cell_id), refuse)

    def cell_ended(self, cell_id: str, state: str, reason: str | None = None) -> None:
        """Ends the cell's run now, with the status of ``state`` and the scores for each problem of all its rows.

        A state that is no end (``pending``: the cell is tried again) leaves the run RUNNING.
        """
        attempt = self._attempts[cell_id]
        if state not in ENDED_STATES:
            self._put(
                f"tagging the run of {cell_id}",
                cell_id,
                lambda: self._runs.tag_state(self._opened(cell_id), state, reason),
            )
            return

        def end() -> None:
            self._runs.end(self._opened(cell_id), state, reason, None)
            if not attempt.lost:
                self._ledger.ended(cell_id, Delivered(len(attempt.steps), state, reason))

        if attempt.scores:
            scores = list(attempt.scores.values())
            self._put(
                f"sending scores for each problem of {cell_id}",
                cell_id,
                lambda: self._send_scores(self._opened(cell_id), scores),
            )
            attempt.scores = {}
        self._put(f"ending the run of {cell_id}", cell_id, end)

    def restore(
        self,
        cell_id: str,
        params: Mapping[str, Any],
        count: int,
        read_rows: Callable[[], Sequence[Row]],
        state: str,
        reason: str | None = None,
    ) -> None:
        """Completes the run of a cell that this process does not train: rows, per-problem scores and status that
        never arrived. A complete one stays as it is; a changed one ends at its last row's time. One of which the
        ledger says that all has arrived costs no request.

        Args:
            cell_id: the cell.
            params: the run's parameters.
            count: its rows, the base model's included.
            read_rows: gives the rows, on another thread, when it is their turn.
            state: the cell's state; one that is no end becomes ``interrupted``.
            reason: the state's reason.
        """
        state = state if state in ENDED_STATES else "interrupted"
        if self._ledger.has(cell_id, count, state, reason):
            return

        def complete() -> None:
            rows = read_rows()
            run = self._runs.open_cell(cell_id, self.parent_run_id, params)
            self._runs.send(run, rows)
            if scores := [found for row in rows if (found := _scores(row))]:
                self._send_scores(run, scores)
            self._runs.end(run, state, reason, max((row[TIME_COLUMN] for row in rows), default=None))
            self._ledger.ended(cell_id, Delivered(count, state, reason))
            with self._lock:
                self._unrestored.pop(cell_id)

        def refuse() -> None:
            with self._lock:
                self._refused_rows += self._unrestored.pop(cell_id)

        with self._lock:
            self._unrestored[cell_id] = count
        self._outbox.put(f"restoring the run of {cell_id}", complete, refuse)

    def grid_metrics(self, values: Mapping[str, float], step: int, at_ms: int) -> None:
        """Sends figures of the whole grid to the parent run, at a step and a time in milliseconds since the epoch."""
        self._outbox.put(
            "sending figures of the grid",
            lambda: self._runs.send_figures(self.parent_run_id, values, step, at_ms),
        )

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
                "ending the grid's run", lambda: self._runs.end_parent(self.parent_run_id, status)
            )
        self._outbox.close(timeout)
        with self._lock:
            waiting = sum(len(rows) for rows in self._pending.values()) + sum(self._unrestored.values())
            return self._refused_rows + waiting

    def _find_home(self, run_key: str, run_name: str) -> None:
        """Look again at a server that was away at the start: it may have lost what the ledger knows."""
        known = self._home
        self._home = find_home(
            self._client, known.uri, known.experiment, run_key, run_name, known, self._ledger.check
        )
        self._runs = GridRuns(self._client, self._home.experiment_id, run_key, self._ledger.check)
        self._ledger.settle(self._home)

    def _holds_lease(self) -> bool:
        try:
            self._ledger.check()
        except LeaseLost:
            return False
        except OSError as error:  # the run folder's storage is away: nothing is known, so wait
            raise ConnectionError(f"the lease cannot be read: {error}") from error
        return True

    def _put(
        self,
        what: str,
        cell_id: str,
        call: Callable[[], object],
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        attempt = self._attempts[cell_id]

        def refuse() -> None:
            attempt.lost = True
            refused()

        self._outbox.put(what, call, refuse)

    def _opened(self, cell_id: str) -> CellRun:
        if cell_id not in self._cell_runs:
            raise RuntimeError(f"the run of {cell_id} was never opened")
        return self._cell_runs[cell_id]

    def _send_rows(self, cell_id: str) -> None:
        """Sends all rows of the cell that wait, also those of later ``row`` calls (which then find none)."""
        run = self._opened(cell_id)
        while True:
            with self._lock:
                rows = self._pending[cell_id][:ROWS_AT_ONCE]
            if not rows:
                return
            self._runs.send(run, rows)
            with self._lock:
                del self._pending[cell_id][: len(rows)]

    def _send_scores(self, run: CellRun, scores: Sequence[Row]) -> None:
        self._client.log_text(run.run_id, per_problem_text(scores), PER_PROBLEM_FILE)


def _scores(row: Row) -> dict[str, Any]:
    """A row's step and per-problem columns; empty when it has none of these."""
    scores = {name: row[name] for name in PER_PROBLEM_COLUMNS if name in row}
    return {STEP_COLUMN: row[STEP_COLUMN]} | scores if scores else {}

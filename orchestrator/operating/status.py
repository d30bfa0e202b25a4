"""The state of a run as rows, read from its folder alone."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from grids.errors import UserError
from grids.expansion import Cell, expand
from grids.spec import GridSpec
from orchestrator.control.selection import has_more_to_do
from orchestrator.operating.outlook import Outlook
from orchestrator.store.cell_state import CellState, State
from orchestrator.store.cell_store import last_row
from orchestrator.store.run_store import RunStore
from orchestrator.tables import Seconds

Row = dict[str, Any]


def status_rows(run_store: RunStore, spec: GridSpec, outlook: Outlook, now: float | None = None) -> list[Row]:
    """One row for each cell of the run's grid, in the grid's order.

    ``age`` is the time since the cell's state or history last changed; None for a cell that was never written. ``eta`` is the
    time until the cell is done, if the run goes on as it did; None where that is not known, or the cell is not to be trained.

    Args:
        run_store: the run.
        spec: its grid.
        outlook: to be told of each cell.
        now: unix seconds; the present time when None.
    """
    score = f"avg_at_{spec.evaluation.samples_per_problem}"
    now = time.time() if now is None else now
    states = run_store.states()
    rows = []
    for cell in expand(spec):
        name = cell.id
        state = states.get(name) or CellState(name)
        history = run_store.history_path(name)
        # A cell that was never tried has no history; looking for it would cost as much as the state itself.
        last = (last_row(history) if state.attempt else None) or {}
        step = max(state.committed_step, last.get("step", 0))
        spent, shown = state.spent_now, shown_state(state, cell)
        outlook.add(cell, shown, step)
        rows.append(
            {
                "cell": name,
                "state": str(shown),
                "step": step,
                "M": cell.update_steps,
                "C": step * cell.batch_rollouts,
                f"avg@{spec.evaluation.samples_per_problem}": last.get(score),
                "attempt": state.attempt,
                "committed": state.committed_step,
                "retries": spent.own_failures + spent.preemptions,
                "age": _age(history, state, now),
                "eta": None,
                "reason": state.reason or "",
            }
        )
    ends = outlook.ends()
    for row in rows:
        if row["cell"] in ends:
            row["eta"] = Seconds(round(ends[row["cell"]], 1))
    return rows


def shown_state(state: CellState, cell: Cell) -> State:
    """The cell's state; a finished cell of which the grid now asks more steps waits for them."""
    more = state.state is State.FINISHED and has_more_to_do(cell, state)
    return State.PENDING if more else state.state


def chosen_rows(rows: Sequence[Row], states: str | None, sort: str | None, descending: bool) -> list[Row]:
    """The rows in ``states`` (names with commas between), ordered by a column; cells without a value come last.

    Raises:
        UserError: an unknown state or column.
    """
    chosen = list(rows)
    if states is not None:
        wanted = {name.strip() for name in states.split(",")}
        unknown = sorted(wanted - set(State))
        if unknown:
            raise UserError(f"--state: no state {unknown[0]!r}; states are {', '.join(State)}")
        chosen = [row for row in chosen if row["state"] in wanted]
    if sort is not None and rows:
        columns = {name.lower(): name for name in rows[0]}
        column = columns.get(sort.lower())
        if column is None:
            raise UserError(f"--sort: no column {sort!r}; columns are {', '.join(rows[0])}")
        present = [row for row in chosen if row[column] is not None]
        present.sort(key=lambda row: row[column], reverse=descending)
        chosen = present + [row for row in chosen if row[column] is None]
    elif descending:
        chosen.reverse()
    return chosen


def counts_line(rows: Sequence[Row]) -> str:
    """How many cells are in each state, for people."""
    counts = Counter(row["state"] for row in rows)
    parts = [f"{counts[state]:,} {state}" for state in State if counts[state]]
    return f"{len(rows):,} cells: {', '.join(parts)}"


def _age(history: str, state: CellState, now: float) -> Seconds | None:
    changed = state.updated_at
    if state.state is State.RUNNING:
        with suppress(FileNotFoundError):
            changed = max(changed, os.stat(history).st_mtime)
    return Seconds(round(max(0.0, now - changed), 1)) if changed else None

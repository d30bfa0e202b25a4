"""What of a run folder MLflow is to show: a cell's parameters, its rows, and the cells that ended in earlier starts."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from grids.expansion import Cell
from orchestrator.store.run_store import CellState, RunStore, State
from orchestrator.tracking.tracker import Tracker


def cell_parameters(cell: Cell) -> dict[str, Any]:
    """What MLflow shows as the parameters of a cell's run."""
    return {
        "problems_per_batch": cell.problems_per_batch,
        "rollouts_per_problem": cell.rollouts_per_problem,
        "batch_rollouts": cell.batch_rollouts,
        "seed": cell.seed,
        "update_steps": cell.update_steps,
        "learning_rate": cell.learning_rate,
        "compute_rollouts": cell.compute_rollouts,
    }


def tracked_rows(run_store: RunStore, cell: Cell) -> list[dict[str, Any]]:
    """The base model's row, at which every chart starts, and the cell's rows that stand."""
    base, store = run_store.read_base(), run_store.cell(cell.id)
    return ([base] if base else []) + store.rows()[: _standing(store.read())]


def restore_tracking(
    tracker: Tracker, run_store: RunStore, cells: Iterable[Cell], states: Mapping[str, CellState]
) -> None:
    """Offer MLflow what it may have missed of cells that this process does not train. Rows are read when they are
    sent. ``states`` is ``run_store.states()``.
    """
    based = run_store.read_base() is not None
    for cell in cells:
        state = states.get(cell.id)
        if state is None or state.attempt == 0:
            continue  # never started, so MLflow knows no run of it
        standing = _standing(state)
        count = len(run_store.cell(cell.id).rows()) if standing is None else standing
        read = partial(tracked_rows, run_store, cell)
        tracker.restore(cell.id, cell_parameters(cell), count + based, read, state.state, state.reason)


def _standing(state: CellState) -> int | None:
    """How many rows of a history no attempt will make again: the committed ones, and all (None) of a diverged cell."""
    if state.state is State.DIVERGED:
        return None
    return state.commit.history_rows if state.commit else 0

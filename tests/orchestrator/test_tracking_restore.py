"""What a later start offers to MLflow of cells that it does not train. No server answers here: what is offered waits."""

from pathlib import Path
from typing import Any

import pytest

from grids.errors import UserError
from grids.expansion import Cell, expand
from grids.loading import dump_grid, parse_grid
from orchestrator.services.local import free_port
from orchestrator.store.run_store import RunStore, State
from orchestrator.tracking.ledger import Delivered, Home, Ledger
from orchestrator.tracking.tracked_rows import restore_tracking, tracked_rows
from orchestrator.tracking.tracker import Tracker
from tests.grids.test_spec import GRID, PATH

FINISHED, DIVERGED, FAILED, UNTOUCHED = range(4)


@pytest.fixture
def cells() -> list[Cell]:
    return expand(parse_grid(GRID.replace("[4, 16]", "[2, 4, 8, 16]"), PATH))


@pytest.fixture
def run_store(tmp_path: Path, cells: list[Cell]) -> RunStore:
    """A cell of 2 committed rows that finished, one that diverged and one that failed, each 1 row after its last commit."""
    spec = dump_grid(parse_grid(GRID, PATH))
    store = RunStore.open(tmp_path, spec, {"run_id": "k", "spec": spec})
    store.hold(1, lambda: None)
    store.write_base({"compute_rollouts": 0, "avg_at_4": 0.1, "logged_at_ms": 1})
    for number, state in ((FINISHED, State.FINISHED), (DIVERGED, State.DIVERGED), (FAILED, State.FAILED)):
        cell = store.cell(cells[number].id)
        cell.start_attempt()
        for step in (1, 2):
            cell.append_row(history_row(step))
        cell.commit(2, None, {}, State.FINISHED if state is State.FINISHED else State.RUNNING)
        if state is not State.FINISHED:
            cell.append_row(history_row(3))
            cell.set_state(state, "why")
        cell.close()
    store.cell(cells[UNTOUCHED].id).set_state(State.PENDING)
    return store


def history_row(step: int) -> dict[str, Any]:
    return {"step": step, "compute_rollouts": 8 * step, "avg_at_4": 0.1, "logged_at_ms": step}


def away(run_dir: Path) -> Tracker:
    """A tracker of a later start whose server, known from an earlier one, does not answer."""
    known = Ledger.open(run_dir, 1, lambda: None)
    home = Home(f"http://127.0.0.1:{free_port()}", "grid", "7", "parent")
    known.settle(known.home or home)
    ledger = Ledger.open(run_dir, 2, lambda: None)
    assert ledger.home is not None
    return Tracker.connect(ledger.home.uri, "grid", "k", "grid", ledger)


def test_committed_rows_stand_and_all_rows_of_a_diverged_cell(run_store: RunStore, cells: list[Cell]) -> None:
    steps = [[row["compute_rollouts"] for row in tracked_rows(run_store, cell)] for cell in cells]
    assert steps == [[0, 8, 16], [0, 8, 16, 24], [0, 8, 16], [0]]


def test_cells_that_ended_are_offered_and_untouched_ones_are_not(
    run_store: RunStore, cells: list[Cell], tmp_path: Path
) -> None:
    tracker = away(tmp_path)
    assert tracker.away is not None
    restore_tracking(tracker, run_store, cells, run_store.states())
    assert tracker.close("FINISHED", 0.2) == 3 + 4 + 3


def test_what_mlflow_has_confirmed_is_not_offered_again(
    run_store: RunStore, cells: list[Cell], tmp_path: Path
) -> None:
    earlier = Ledger.open(tmp_path, 1, lambda: None)
    earlier.settle(Home(f"http://127.0.0.1:{free_port()}", "grid", "7", "parent"))
    earlier.ended(cells[FINISHED].id, Delivered(3, "finished"))
    # Its rows after the last commit arrived, too.
    earlier.ended(cells[FAILED].id, Delivered(4, "failed", "why"))
    # One row is missing.
    earlier.ended(cells[DIVERGED].id, Delivered(3, "diverged", "why"))
    tracker = away(tmp_path)
    restore_tracking(tracker, run_store, cells, run_store.states())
    assert tracker.close("FINISHED", 0.2) == 4


def test_a_changed_address_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    tracker = away(tmp_path)
    tracker.close(None, 0.2)
    ledger = Ledger.open(tmp_path, 3, lambda: None)
    with pytest.raises(UserError, match=r"tracking\.mlflow_uri"):
        Tracker.connect(f"http://127.0.0.1:{free_port()}", "grid", "k", "grid", ledger)

"""Which cells a run takes up."""

import pytest

from grids.errors import UserError
from grids.expansion import Cell
from orchestrator.control.selection import Selection, take_up
from orchestrator.store.cell_state import CellState, Commit, State

CELLS = [Cell(8, 2 ** (index + 1), 0, update_steps=10, learning_rate=1e-4) for index in range(8)]
IDS = [cell.id for cell in CELLS]


def state(index: int, state: State, step: int = 0) -> CellState:
    return CellState(IDS[index], state, attempt=1, commit=Commit(step, 0, 0, None, {}) if step else None)


STATES = {
    found.cell: found
    for found in [
        state(0, State.PENDING),
        state(1, State.RUNNING, 4),  # its controller was killed
        state(2, State.PAUSED, 4),
        state(3, State.FAILED, 4),
        state(4, State.DIVERGED, 4),
        state(5, State.CANCELLED, 4),
        state(6, State.FINISHED, 10),
    ]
}  # the eighth was never started


def taken(selection: Selection, cells: list[Cell] = CELLS) -> list[int]:
    return [IDS.index(cell.id) for cell in take_up(cells, STATES, selection)]


def test_a_run_takes_up_what_waits_or_was_interrupted_and_leaves_the_rest_alone() -> None:
    assert taken(Selection()) == [0, 1, 2, 7]


def test_failed_cells_are_resumed_alone() -> None:
    assert taken(Selection(failed=True)) == [3]


def test_named_cells_are_resumed_alone_in_the_grids_order_whatever_ended_them() -> None:
    assert taken(Selection(cells=(IDS[5], IDS[3], IDS[0]))) == [0, 3, 5]


def test_a_finished_cell_goes_on_when_the_budget_has_grown() -> None:
    larger = [Cell(c.problems_per_batch, c.rollouts_per_problem, c.seed, 20, c.learning_rate) for c in CELLS]
    assert taken(Selection(), larger) == [0, 1, 2, 6, 7]
    assert taken(Selection(cells=(IDS[6],)), larger) == [6]


def test_a_cell_with_nothing_left_to_do_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=f"--cell: {IDS[6]} is finished"):
        taken(Selection(cells=(IDS[6],)))
    with pytest.raises(UserError, match=f"--cell: {IDS[4]} has diverged"):
        taken(Selection(cells=(IDS[4],)))


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(UserError, match="no cell 'bp9-n9-s9'"):
        taken(Selection(cells=("bp9-n9-s9",)))

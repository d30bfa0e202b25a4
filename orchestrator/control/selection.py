"""Which cells of a grid a run takes up: pure decisions over their states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grids.errors import UserError
from grids.expansion import Cell
from orchestrator.store.cell_state import CellState, State

AT_REST = (State.FINISHED, State.DIVERGED, State.CANCELLED, State.FAILED)
"""States that a run leaves alone unless its cells are asked for: failed cells wait for an operator."""


@dataclass(frozen=True)
class Selection:
    """What to take up; by default every cell that waits, was interrupted or has more steps to do than it had."""

    cells: tuple[str, ...] = ()
    """Only these."""
    failed: bool = False
    """Only failed ones."""


def take_up(cells: Sequence[Cell], states: Mapping[str, CellState], selection: Selection) -> list[Cell]:
    """The cells that a run trains, in the grid's order.

    Raises:
        UserError: a cell is asked for that the grid does not have, or that has nothing left to do.
    """
    state_of = {cell.id: states.get(cell.id, CellState(cell=cell.id)) for cell in cells}
    if selection.failed:
        return [cell for cell in cells if state_of[cell.id].state is State.FAILED]
    if selection.cells:
        for wanted in selection.cells:
            if wanted not in state_of:
                raise UserError(f"--cell: the grid has no cell {wanted!r}; `isocompute status` lists them")
        chosen = [cell for cell in cells if cell.id in selection.cells]
        for cell in chosen:
            if not has_more_to_do(cell, state_of[cell.id]):
                raise UserError(f"--cell: {cell.id} {_DONE[state_of[cell.id].state]}; leave it out")
        return chosen
    return [
        cell
        for cell in cells
        if state_of[cell.id].state not in AT_REST
        or (state_of[cell.id].state is State.FINISHED and has_more_to_do(cell, state_of[cell.id]))
    ]


def has_more_to_do(cell: Cell, state: CellState) -> bool:
    """Whether an attempt at the cell could get it further: a finished one after the grid's budget has grown."""
    if state.state is State.FINISHED:
        return state.commit is not None and state.commit.step < cell.update_steps
    return state.state is not State.DIVERGED


_DONE = {State.FINISHED: "is finished", State.DIVERGED: "has diverged, which is a result"}

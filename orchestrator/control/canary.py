"""A canary of a grid: a few steps of its smallest and its largest cell show what phases take, before the grid is paid for."""

from collections.abc import Sequence
from dataclasses import replace

from grids.expansion import Cell
from grids.spec import GridSpec

CANARY_STEPS = 2


def canary_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The first cells of the smallest and of the largest batch (one cell where all batches are equal), cut to a few steps."""

    def batch(cell: Cell) -> int:
        return cell.batch_rollouts

    chosen = dict.fromkeys((min(cells, key=batch), max(cells, key=batch)))
    return [replace(cell, update_steps=min(CANARY_STEPS, cell.update_steps)) for cell in chosen]


def canary_spec(spec: GridSpec) -> GridSpec:
    """The grid under a name of its own, which keeps its metrics apart."""
    return spec.model_copy(update={"name": f"{spec.name}-canary"})

"""Cells that wait for a slot."""

from bisect import insort
from collections.abc import Sequence

from grids.expansion import Cell
from orchestrator.scheduling.remaining import RemainingWork

SORT_GROWTH = 1.25
"""The order is worked out anew once the cost model has seen so many times more phases."""


class WaitingCells:
    """Longest remaining work first, or the longest cell would end alone on idle pools; of equal ones in the grid's order."""

    def __init__(self, grid: Sequence[Cell], remaining: RemainingWork) -> None:
        """Nobody waits yet."""
        self._remaining = remaining
        self._places = {cell.id: place for place, cell in enumerate(grid)}
        self._steps: dict[str, tuple[Cell, int]] = {}
        self._order: list[tuple[float, int, str]] = []
        """(remaining seconds, place from the grid's end, cell), the next one last."""
        self._sorted_at = 0

    def __len__(self) -> int:
        """Cells that wait."""
        return len(self._steps)

    def add(self, cell: Cell, step: int) -> None:
        """A cell of the grid waits that has made so many steps."""
        self.discard(cell.id)
        self._steps[cell.id] = (cell, step)
        insort(self._order, self._rank(cell, step))

    def discard(self, cell_id: str) -> None:
        """A cell waits no longer, if it did."""
        if self._steps.pop(cell_id, None) is not None:
            self._order = [rank for rank in self._order if rank[2] != cell_id]

    def pop(self) -> Cell:
        """The next one, which waits no longer. Raises IndexError when nobody waits."""
        seen = self._remaining.costs.observations
        if seen > SORT_GROWTH * self._sorted_at:
            self._order = sorted(self._rank(cell, step) for cell, step in self._steps.values())
            self._sorted_at = seen
        cell_id = self._order.pop()[2]
        return self._steps.pop(cell_id)[0]

    def _rank(self, cell: Cell, step: int) -> tuple[float, int, str]:
        return self._remaining.seconds(cell, step), -self._places[cell.id], cell.id

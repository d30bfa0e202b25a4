"""Which of the cells in flight is served first."""

from bisect import bisect_left, bisect_right

from grids.expansion import Cell
from orchestrator.scheduling.remaining import RemainingWork
from orchestrator.scheduling.waiting import WaitingCells


class Urgencies:
    """What is left to do in each slot: of its cell, and of the waiting cells that are to come after it.

    The slot with most left is served first. By what is left of the cells in flight alone these would all end together, and where
    the cells that wait then are fewer than the slots, they would end alone on idle pools: some slots must be through with their
    cells earlier. Those with least left are, so the first in line comes after the cell with least left, the next one after the
    cell with the second least, and so on, round by round.
    """

    def __init__(self, remaining: RemainingWork, waiting: WaitingCells) -> None:
        """Nothing is in flight."""
        self._remaining, self._waiting = remaining, waiting
        self._left: dict[str, float] = {}
        """Seconds that are left of each cell in flight, as it was last asked for."""
        self._sorted: list[float] = []
        """The same, least first."""

    def of(self, cell: Cell, step: int) -> float:
        """How urgent the phases of a cell are that has made so many steps, in seconds; it is in flight from now on."""
        self.ended(cell)
        left = self._left[cell.id] = self._remaining.seconds(cell, step)
        # Of equal ones whoever came first: all of them in a hurry would end together again.
        before = bisect_right(self._sorted, left)
        self._sorted.insert(before, left)
        return left + self._waiting.seconds_of_every(len(self._sorted), before)

    def ended(self, cell: Cell) -> None:
        """A cell is in flight no longer, if it was."""
        left = self._left.pop(cell.id, None)
        if left is not None:
            del self._sorted[bisect_left(self._sorted, left)]

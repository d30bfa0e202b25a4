"""Cells that wait for a slot."""

from bisect import insort
from collections.abc import Sequence

from grids.expansion import Cell
from orchestrator.scheduling.remaining import Alike, RemainingWork

SORT_GROWTH = 1.25
"""What is left is worked out anew once the cost model has seen so many times more phases."""


class WaitingCells:
    """Longest remaining work first, or the longest cell would end alone on idle pools; of equal ones in the grid's order.

    Thousands may wait, but most are alike in size and steps: what is left is worked out once for all of them.
    """

    def __init__(self, grid: Sequence[Cell], remaining: RemainingWork) -> None:
        """Nobody waits yet."""
        self._remaining = remaining
        self._places = {cell.id: -place for place, cell in enumerate(grid)}
        """From the grid's end: the first cell has the largest."""
        self._steps: dict[str, tuple[Cell, int]] = {}
        """Those that wait, and the steps that they have made."""
        self._alike: dict[Alike, list[tuple[int, str]]] = {}
        """The same as (place, cell), those of which the same is left together, the next one last."""
        self._seconds: dict[Alike, float] = {}
        """What is left of each of them."""
        self._known_at = 0

    def __len__(self) -> int:
        """Cells that wait."""
        return len(self._steps)

    def add(self, cell: Cell, step: int) -> None:
        """A cell of the grid waits that has made so many steps."""
        self.discard(cell.id)
        self._steps[cell.id] = cell, step
        alike = self._remaining.alike(cell, step)
        if alike not in self._alike:
            self._alike[alike] = []
            self._seconds[alike] = self._remaining.seconds(cell, step)
        insort(self._alike[alike], (self._places[cell.id], cell.id))

    def discard(self, cell_id: str) -> None:
        """A cell waits no longer, if it did."""
        waiting = self._steps.pop(cell_id, None)
        if waiting is not None:
            alike = self._remaining.alike(*waiting)
            self._alike[alike].remove((self._places[cell_id], cell_id))
            self._forget_if_none(alike)

    def pop(self) -> Cell:
        """The next one, which waits no longer. Raises IndexError when nobody waits."""
        if not self._steps:
            raise IndexError("nobody waits")
        self._follow_costs()
        longest = max(self._alike, key=lambda alike: (self._seconds[alike], self._alike[alike][-1]))
        _, cell_id = self._alike[longest].pop()
        self._forget_if_none(longest)
        return self._steps.pop(cell_id)[0]

    def seconds_of_every(self, slots: int, first: int) -> float:
        """What is left of every ``slots``-th cell in line, from place ``first`` on (0 is the next one)."""
        self._follow_costs()
        seconds, place = 0.0, first
        """The first such place that has not been passed, counted from where the cells begin that are looked at."""
        for alike in sorted(self._alike, key=self._seconds.__getitem__, reverse=True):
            among = len(self._alike[alike])
            if place < among:
                taken = (among - place - 1) // slots + 1
                seconds += taken * self._seconds[alike]
                place += taken * slots
            place -= among
        return seconds

    def _follow_costs(self) -> None:
        """Work out anew what is left, once the cost model has learnt much more."""
        seen = self._remaining.costs.observations
        if seen > SORT_GROWTH * self._known_at:
            for alike, cells in self._alike.items():
                self._seconds[alike] = self._remaining.seconds(*self._steps[cells[-1][1]])
            self._known_at = seen

    def _forget_if_none(self, alike: Alike) -> None:
        if not self._alike[alike]:
            del self._alike[alike], self._seconds[alike]

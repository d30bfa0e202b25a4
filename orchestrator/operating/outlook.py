"""How a run does and when it will be done, told from the phases that it has on record."""

from collections.abc import Sequence

from grids.expansion import Cell
from grids.spec import GridSpec
from orchestrator.scheduling.costs import CostModel
from orchestrator.scheduling.eta import expected_ends
from orchestrator.scheduling.remaining import Remaining, RemainingWork, bound_of_what_is_left
from orchestrator.scheduling.usage import pool_sizes, usage
from orchestrator.store.cell_state import State
from orchestrator.store.phase_log import PhaseKind, PhaseRecord
from orchestrator.tables import duration

WAITING = (State.PENDING, State.PAUSED)


class Outlook:
    """What is left of the cells of a run: ``add`` each of them, then ask."""

    def __init__(self, spec: GridSpec, records: Sequence[PhaseRecord]) -> None:
        """Judged by these records; without any nothing is known."""
        self._pools, self._records = spec.pools, records
        self._costs = CostModel(records)
        self._remaining = RemainingWork(spec, self._costs)
        self._usage = usage(records, pool_sizes(spec))
        self._steps = _steps_in_flight(records)
        self._left: list[Remaining] = []
        self._running: dict[str, float] = {}
        self._waiting: dict[str, float] = {}

    def add(self, cell: Cell, state: State, step: int) -> None:
        """A cell that has made at least so many steps. One that will not be trained as things are does not count."""
        if not self._records or state not in (State.RUNNING, *WAITING):
            return
        if state is State.RUNNING:
            step = max(step, self._steps.get(cell.id, 0))
        left = self._remaining.of(cell, step)
        self._left.append(left)
        place = self._running if state is State.RUNNING else self._waiting
        place[cell.id] = left.chain * self._costs.stretch

    def ends(self) -> dict[str, float]:
        """Seconds until each cell is done that is trained or will be, if the run goes on as it did."""
        return expected_ends(self._running, self._waiting, self._pools.learners.cells_in_flight)

    def line(self) -> str | None:
        """What is left of the grid, and how busy the pools were lately, for people; None where nothing is known."""
        parts = []
        if self._left:
            bound = bound_of_what_is_left(self._left, self._pools.samplers.count, self._pools.learners.count)
            expected = max(bound, *self.ends().values())
            parts.append(f"about {duration(expected)} to go, at least {duration(bound)}")
        if self._usage is not None:
            shares = ", ".join(f"{name}s {pool.busy_share:.0%}" for name, pool in self._usage.pools.items())
            parts.append(
                f"busy over the last {duration(self._usage.seconds)}: {shares}; "
                f"{self._usage.rollouts_per_second:,.4g} rollouts/s, {self._usage.tokens_per_second:,.4g} tokens/s"
            )
        return "; ".join(parts) or None


def _steps_in_flight(records: Sequence[PhaseRecord]) -> dict[str, int]:
    """The latest step of each cell, committed or not."""
    steps: dict[str, int] = {}
    for record in records:
        if record.kind in (PhaseKind.TAKING_UP, PhaseKind.LEARNING) and not record.failed:
            steps[record.cell] = record.step
    return steps

"""What no schedule of a grid can do without."""

from collections.abc import Sequence
from typing import NamedTuple

from grids.expansion import Cell, evaluated_steps
from grids.spec import GridSpec
from orchestrator.scheduling.spreading import graded_last, largest_part
from orchestrator.simulation.conditions import Conditions
from orchestrator.store.phase_log import PhaseKind


class Bound(NamedTuple):
    """Seconds, each of which is a lower bound of the wall-clock; nobody waits for anybody, and nothing is lost."""

    sampling: float
    """All sampling, spread evenly over the engines, no batch cut into parts."""
    learning: float
    """All learning, each cell's taking up and its last commit, spread evenly over groups that serve one call at a time."""
    grading: float
    """All grading, by one grader."""
    chain: float
    """The phases of the longest cell that follow one another, each batch spread over as many engines as it fills; of a step's
    grading only the last slice of a part follows its sampling."""

    @property
    def seconds(self) -> float:
        """The bound."""
        return max(self)


def makespan_bound(spec: GridSpec, cells: Sequence[Cell], conditions: Conditions) -> Bound:
    """Of the makespan of these cells from nothing, on the grid's pools in a simulated world.

    ``conditions.times`` must not be random. ``scheduling.remaining.bound_of_what_is_left`` is of what is left of a real grid.
    """
    seconds, handovers = conditions.times.seconds, conditions.handovers
    engines, full = spec.pools.samplers.count, spec.pools.samplers.max_sequences

    def alone(kind: PhaseKind, grading: PhaseKind, groups: int, n: int) -> tuple[float, float, float]:
        """(engine's seconds, grader's seconds, seconds until it is graded) of a batch."""
        part = largest_part(groups, n, engines, full)
        # Evaluations are graded as a whole.
        last = graded_last(part, n) if grading is PhaseKind.GRADING else groups
        soonest = seconds(kind, part * n) + seconds(grading, last * n)
        soonest += handovers.get(kind, 0.0) + handovers.get(grading, 0.0)
        return seconds(kind, groups * n), seconds(grading, groups * n), soonest

    evaluation = [
        alone(PhaseKind.EVALUATION, PhaseKind.EVALUATION_GRADING, *batch) for batch in conditions.evaluation
    ]
    ends = seconds(PhaseKind.TAKING_UP, 0) + seconds(PhaseKind.COMMIT, 0)
    handed = handovers.get(PhaseKind.TAKING_UP, 0.0) + handovers.get(PhaseKind.COMMIT, 0.0)
    sampling = learning = grading = chain = 0.0
    for cell in cells:
        steps, marks = cell.update_steps, evaluated_steps(cell, spec.evaluation)
        engine, grader, soonest = alone(
            PhaseKind.SAMPLING, PhaseKind.GRADING, cell.problems_per_batch, cell.rollouts_per_problem
        )
        learner = seconds(PhaseKind.LEARNING, cell.batch_rollouts)
        sampling += steps * engine + len(marks) * sum(one[0] for one in evaluation)
        grading += steps * grader + len(marks) * sum(one[1] for one in evaluation)
        learning += steps * learner + ends
        own = steps * (soonest + learner + handovers.get(PhaseKind.LEARNING, 0.0)) + ends + handed
        if marks and marks[-1] == steps:  # before the last commit; earlier ones run beside later steps
            own += sum(one[2] for one in evaluation)
        chain = max(chain, own)
    return Bound(sampling / engines, learning / spec.pools.learners.count, grading, chain)

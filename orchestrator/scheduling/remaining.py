"""What is left to do of a cell and of a grid."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from grids.expansion import Cell, evaluated_steps
from grids.spec import GridSpec
from orchestrator.scheduling.costs import TRAINING, CostModel
from orchestrator.scheduling.spreading import graded_last, largest_part
from orchestrator.store.phase_log import PhaseKind

Alike = tuple[int, int, int]
"""Rollouts of a batch, steps, steps made: what the seconds that are left of a cell depend on."""


class Remaining(NamedTuple):
    """Seconds that a cell will still keep members of the pools busy."""

    sampling: float
    grading: float
    learning: float
    evaluations: int
    evaluation: float
    """Of an engine, for one of them."""
    evaluation_grading: float
    chain: float
    """What cannot be done at the same time, were all engines free for it: the steps, of whose grading only the last slice
    follows sampling, and the last evaluation. Earlier ones run beside later steps."""

    @property
    def seconds(self) -> float:
        """All of it."""
        evaluations = self.evaluations * (self.evaluation + self.evaluation_grading)
        return self.sampling + self.grading + self.learning + evaluations


class RemainingWork:
    """What is left of the cells of a grid, as a cost model sees it at the moment."""

    def __init__(self, spec: GridSpec, costs: CostModel) -> None:
        """Of a grid whose phases ``costs`` has seen."""
        self.costs = costs
        self._evaluation, self._samplers = spec.evaluation, spec.pools.samplers
        self._marks: dict[tuple[int, int], list[int]] = {}
        self._costs: dict[tuple[int, int], tuple[float, ...]] = {}
        """Of a step, by problems and rollouts of each, and of an evaluation: good until the model learns more."""
        self._costs_at = -1

    def of(self, cell: Cell, step: int) -> Remaining:
        """Of a cell that has made so many steps."""
        key = (cell.batch_rollouts, cell.update_steps)
        marks = self._marks.get(key)
        if marks is None:
            marks = self._marks[key] = evaluated_steps(cell, self._evaluation)
        sampling, grading, learning, soonest, evaluation, evaluation_grading = self._costs_of(cell)
        steps, evaluations = max(cell.update_steps - step, 0), len(marks) - bisect_right(marks, step)
        chain = steps * (soonest + learning)
        if evaluations:
            chain += evaluation / self._samplers.count + evaluation_grading
        return Remaining(
            steps * sampling,
            steps * grading,
            steps * learning,
            evaluations,
            evaluation,
            evaluation_grading,
            chain,
        )

    def _costs_of(self, cell: Cell) -> tuple[float, ...]:
        """Sampling, grading and learning of a batch, its graded rollouts at the soonest, an evaluation and its grading."""
        model, samplers = self.costs, self._samplers
        groups, n = batch = (cell.problems_per_batch, cell.rollouts_per_problem)
        if self._costs_at != model.observations:
            self._costs, self._costs_at = {}, model.observations
        found = self._costs.get(batch)
        if found is None:
            part = largest_part(groups, n, samplers.count, samplers.max_sequences)
            soonest = model.seconds(PhaseKind.SAMPLING, part * n)
            soonest += model.seconds(PhaseKind.GRADING, graded_last(part, n) * n)
            found = self._costs[batch] = (
                *(model.seconds(kind, cell.batch_rollouts) for kind in TRAINING),
                soonest,
                model.evaluation_seconds(PhaseKind.EVALUATION),
                model.evaluation_seconds(PhaseKind.EVALUATION_GRADING),
            )
        return found

    def alike(self, cell: Cell, step: int) -> Alike:
        """The same for cells of which the same is left."""
        return cell.batch_rollouts, cell.update_steps, step

    def seconds(self, cell: Cell, step: int) -> float:
        """All that is left of a cell that has made so many steps."""
        return self.of(cell, step).seconds


def bound_of_what_is_left(cells: Iterable[Remaining], engines: int, groups: int) -> float:
    """Seconds that no schedule of what is left can do without: the busiest pool's work (there is one grader), or the longest
    cell's own chain."""
    sampling = grading = learning = longest = 0.0
    for one in cells:
        sampling += one.sampling + one.evaluations * one.evaluation
        grading += one.grading + one.evaluations * one.evaluation_grading
        learning += one.learning
        longest = max(longest, one.chain)
    return max(sampling / engines, grading, learning / groups, longest)

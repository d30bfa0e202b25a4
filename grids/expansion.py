"""From a grid specification to its cells: pure, ordered, without I/O."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from grids.errors import UserError
from grids.spec import EvaluationSpec, GridSpec, OptimiserSpec, PowersOfTwo


@dataclass(frozen=True)
class Cell:
    """One run of the grid: fixed (B_p, n, seed), trained for M update steps."""

    problems_per_batch: int
    """B_p"""
    rollouts_per_problem: int
    """n"""
    seed: int
    update_steps: int
    """M"""
    learning_rate: float
    """Rate after warm-up, scaled with the batch."""

    @property
    def id(self) -> str:
        """Readable and stable, for example ``bp16-n64-s0``."""
        return f"bp{self.problems_per_batch}-n{self.rollouts_per_problem}-s{self.seed}"

    @property
    def batch_rollouts(self) -> int:
        """B = B_p * n"""
        return self.problems_per_batch * self.rollouts_per_problem

    @property
    def compute_rollouts(self) -> int:
        """C = B_p * n * M, training rollouts of the whole cell."""
        return self.batch_rollouts * self.update_steps


CANARY_STEPS = 2
"""Update steps of a canary's cells."""
CELL_ID = re.compile(r"^bp(\d+)-n(\d+)-s(\d+)$")


def expand(spec: GridSpec) -> list[Cell]:
    """All cells of a grid, ordered by B_p, then n, then seed.

    Raises:
        UserError: no combination fits under B_max, or a batch is larger than the budget of a cell.
    """
    axes = spec.grid
    batches = [
        (problems, rollouts)
        for problems in axis_values(axes.problems_per_batch)
        for rollouts in axis_values(axes.rollouts_per_problem)
        if problems * rollouts <= axes.max_batch_rollouts
    ]
    if not batches:
        smallest = axis_values(axes.problems_per_batch)[0] * axis_values(axes.rollouts_per_problem)[0]
        raise UserError(
            f"grid.max_batch_rollouts: {axes.max_batch_rollouts} is below the smallest batch {smallest}, so the grid is empty; "
            f"raise it to at least {smallest}"
        )
    largest = max(problems * rollouts for problems, rollouts in batches)
    if largest > axes.compute_rollouts:
        raise UserError(
            f"grid.compute_rollouts: {axes.compute_rollouts} is less than one batch of {largest} rollouts; "
            f"raise it, or lower grid.max_batch_rollouts"
        )
    cells = [
        Cell(
            problems_per_batch=problems,
            rollouts_per_problem=rollouts,
            seed=seed,
            update_steps=axes.compute_rollouts // (problems * rollouts),
            learning_rate=scaled_learning_rate(spec.optimiser, problems * rollouts),
        )
        for problems, rollouts in batches
        for seed in sorted(axes.seeds)
    ]
    return _canary_cells(cells) if axes.canary else cells


def _canary_cells(cells: list[Cell]) -> list[Cell]:
    """The first cells of the smallest and of the largest batch (one cell where all batches are equal), cut to a few steps."""

    def batch(cell: Cell) -> int:
        return cell.batch_rollouts

    chosen = dict.fromkeys((min(cells, key=batch), max(cells, key=batch)))
    return [replace(cell, update_steps=min(CANARY_STEPS, cell.update_steps)) for cell in chosen]


def canary_of(spec: GridSpec) -> GridSpec:
    """The grid that shows what phases of ``spec`` take before it is paid for; its name keeps its metrics apart."""
    grid = spec.grid.model_copy(update={"canary": True})
    return spec.model_copy(update={"name": f"{spec.name}-canary", "grid": grid})


def axis_values(axis: PowersOfTwo | list[int]) -> list[int]:
    """Values of an axis, ascending."""
    return axis.values if isinstance(axis, PowersOfTwo) else sorted(axis)


def scaled_learning_rate(optimiser: OptimiserSpec, batch_rollouts: int) -> float:
    """Learning rate after warm-up at batch B: base * (B / anchor)^p with p = 1/2, 1 or 0."""
    exponent = {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}[optimiser.scaling]
    return optimiser.learning_rate * (batch_rollouts / optimiser.anchor_batch_rollouts) ** exponent


def warmed_up_learning_rate(learning_rate: float, warmup_steps: int, step: int) -> float:
    """Learning rate of update ``step`` (1-based): linear warm-up, then constant."""
    return learning_rate * min(1.0, step / warmup_steps) if warmup_steps else learning_rate


def compute_marks(evaluation: EvaluationSpec) -> Iterator[int]:
    """The common compute marks, ascending, without end: round(first * 2^(j / m))."""
    previous = 0
    j = 0
    while True:
        mark = round(evaluation.first_mark * 2 ** (j / evaluation.marks_per_doubling))
        if mark > previous:
            yield mark
        previous = mark
        j += 1


def evaluated_steps(cell: Cell, evaluation: EvaluationSpec) -> list[int]:
    """Steps after which a cell is evaluated: for each mark within its compute the first step with C >= mark."""
    steps: list[int] = []
    for mark in compute_marks(evaluation):
        step = math.ceil(mark / cell.batch_rollouts)
        if step > cell.update_steps:
            return steps
        if not steps or step > steps[-1]:
            steps.append(step)
    raise AssertionError("marks have no end")

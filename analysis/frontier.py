"""The compute-optimal frontier: the upper envelope of the cells' curves, inside observed compute only.

At each C only the cells whose observed range contains C are compared, so nothing is extrapolated. What wins
there gives n*(C) and B_p*(C). Cells are compared one by one: with several seeds the best seed counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq

from analysis.curves import CellCurve

GRID_POINTS = 200
"""Compute values at which the envelope is taken, evenly spaced in log C."""


@dataclass(frozen=True)
class FrontierPoint:
    """The best cell at one compute."""

    compute_rollouts: float
    reward: float
    """The winning curve's reward."""
    cell: str
    rollouts_per_problem: int
    """n*(C)."""
    problems_per_batch: int
    """B_p*(C)."""
    compared_n: tuple[int, ...]
    """The values of n observed at this compute, in order. With one alone, n* says nothing."""

    @property
    def is_contested(self) -> bool:
        """Whether at least two values of n were observed here."""
        return len(self.compared_n) > 1


@dataclass(frozen=True)
class Crossover:
    """A compute at which n* changes."""

    compute_rollouts: float
    before: int
    after: int
    kind: Literal["crossing", "coverage"]
    """``crossing``: the two curves cross, both observed. ``coverage``: the change comes from where a cell's
    observed compute begins or ends, and says nothing about which n is better."""


def compute_grid(curves: Sequence[CellCurve], points: int = GRID_POINTS) -> NDArray[np.float64]:
    """Compute values, evenly spaced in log C, shape (points,); empty without curves.

    They run from the smallest observed compute to the end. A budget that is no multiple of a cell's batch is
    rounded down, so cells that ran to the end stop within one batch of each other; the end is where the first
    of these stops, so that the last stretch does not fall to the cell with the smallest batch for want of
    rivals.
    """
    if not curves:
        return np.empty(0)
    furthest = max(curve.fit.compute_max for curve in curves)
    ends = [c.fit.compute_max for c in curves if c.fit.compute_max + c.batch_rollouts > furthest]
    first, last = min(curve.fit.compute_min for curve in curves), min(ends)
    # Clipped, because rounding must not push the ends out of the observed range.
    return np.clip(np.geomspace(first, last, points), first, last)


def envelope(curves: Sequence[CellCurve], compute: NDArray[np.float64]) -> list[FrontierPoint]:
    """The best observed cell at each compute; a compute at which no cell was observed gives no point.

    Equal rewards go to the first curve in the given order (from ``fit_cells``: the smallest n).
    """
    found = []
    for c in compute:
        observed = [curve for curve in curves if _observes(curve, c)]
        if observed:
            best = max(observed, key=lambda curve: float(curve.fit.predict(c)))
            found.append(
                FrontierPoint(
                    compute_rollouts=float(c),
                    reward=float(best.fit.predict(c)),
                    cell=best.cell,
                    rollouts_per_problem=best.rollouts_per_problem,
                    problems_per_batch=best.problems_per_batch,
                    compared_n=tuple(sorted({curve.rollouts_per_problem for curve in observed})),
                )
            )
    return found


def crossovers(curves: Sequence[CellCurve], points: Sequence[FrontierPoint]) -> list[Crossover]:
    """Where n* changes along the frontier's points, in order of compute.

    A crossing is located where the two curves are equal; a change by coverage at the later of the two points.
    """
    by_cell = {curve.cell: curve for curve in curves}
    found = []
    for left, right in pairwise(points):
        if left.rollouts_per_problem == right.rollouts_per_problem:
            continue
        old, new = by_cell[left.cell], by_cell[right.cell]
        ends = (left.compute_rollouts, right.compute_rollouts)
        both = all(_observes(curve, c) for curve in (old, new) for c in ends)
        found.append(
            Crossover(
                compute_rollouts=_crossing(old, new, *ends) if both else right.compute_rollouts,
                before=left.rollouts_per_problem,
                after=right.rollouts_per_problem,
                kind="crossing" if both else "coverage",
            )
        )
    return found


def table_budgets(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Budgets for a short table: the powers of two inside the grid's range and its end; empty for an empty
    grid."""
    if len(grid) == 0:
        return np.empty(0)
    powers = 2.0 ** np.arange(np.ceil(np.log2(grid[0])), np.floor(np.log2(grid[-1])) + 1)
    return np.unique(np.append(powers, grid[-1]))


def frontier_table(points: Sequence[FrontierPoint]) -> pd.DataFrame:
    """The frontier as a table, one row per point.

    Columns: compute_rollouts, reward, rollouts_per_problem, problems_per_batch, update_steps (M = C / (B_p
    n), rounded down), cell, compared_n (as text).
    """
    columns = ["compute_rollouts", "reward", "rollouts_per_problem", "problems_per_batch"]
    columns += ["update_steps", "cell", "compared_n"]
    rows = [
        (
            round(point.compute_rollouts),
            point.reward,
            point.rollouts_per_problem,
            point.problems_per_batch,
            int(point.compute_rollouts // (point.problems_per_batch * point.rollouts_per_problem)),
            point.cell,
            ", ".join(str(n) for n in point.compared_n),
        )
        for point in points
    ]
    return pd.DataFrame(rows, columns=columns)


def _observes(curve: CellCurve, compute: float) -> bool:
    return curve.fit.compute_min <= compute <= curve.fit.compute_max


def _crossing(old: CellCurve, new: CellCurve, left: float, right: float) -> float:
    """Where new overtakes old between two computes; old leads (or ties) at the left one, new at the right
    one."""

    def lead(log_c: float) -> float:
        return float(new.fit.predict(10.0**log_c) - old.fit.predict(10.0**log_c))

    low, high = np.log10(left), np.log10(right)
    if lead(low) * lead(high) >= 0.0:  # a tie at an end
        return right
    return float(10.0 ** brentq(lead, low, high))

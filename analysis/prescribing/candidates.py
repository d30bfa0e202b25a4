"""The allocations that a budget pays for: steps, learning rate and expected metric of each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from analysis.findings import Analysis
from analysis.fitting.curves import AllocationCurve
from analysis.fitting.intervals import Interval
from analysis.fitting.logistic import Array
from analysis.fitting.observations import MIN_POINTS, Allocation
from analysis.prescribing.budgets import budget_words, compute_for, rollouts_within
from grids.errors import UserError
from grids.expansion import scaled_learning_rate
from grids.spec import OptimiserSpec

REACH = 1.05
"""An allocation counts as observed this factor beyond its evaluations: cells of one budget are evaluated last within a
batch of each other, so the exact end of a range says nothing."""


@dataclass(frozen=True)
class Candidate:
    """One allocation at the budget."""

    allocation: Allocation
    update_steps: int
    """M, whole steps that the budget pays for."""
    compute: float
    """What M steps use, in the budget's unit."""
    learning_rate: float | None
    """After warm-up; None where the tables do not tell."""
    reward: float
    """Expected metric after M steps, by the allocation's curve."""
    reward_interval: Interval | None
    difference: float
    """Reward minus the best allocation's; 0 for the best."""
    difference_interval: Interval | None
    """Paired over the bootstrap replicates; None for the best itself and without replicates."""
    best_share: float | None
    """In which share of the replicates this allocation is the best of those that compete."""
    observed: bool
    """Whether ``compute`` lies in the allocation's observed compute."""
    observed_compute: tuple[float, float]
    """The first and the last evaluation, in the budget's unit."""

    @property
    def compute_rollouts(self) -> int:
        """C = M * B."""
        return self.update_steps * self.allocation.batch_rollouts

    @property
    def told_from_best(self) -> bool | None:
        """Whether the interval of the difference stays below 0; None without one."""
        return None if self.difference_interval is None else self.difference_interval[1] < 0.0

    @property
    def beyond(self) -> float:
        """How many times the last evaluation's compute it uses; at most 1 (about) where observed."""
        return self.compute / self.observed_compute[1]


def affordable(
    analysis: Analysis, budget: float, max_batch: int | None
) -> tuple[list[AllocationCurve], list[Candidate]]:
    """The allocations that fit under a largest batch and can make a step, by n and B_p, and their curves.

    They are not compared yet: what compares has no value. Raises UserError when there is none.
    """
    if not analysis.curves:
        raise UserError(
            f"{analysis.tables.name}: no allocation has a curve of {analysis.metric} in {analysis.options.compute}, so nothing can "
            f"be prescribed; train until a cell has at least {MIN_POINTS} evaluations"
        )
    fitting = [c for c in analysis.curves if max_batch is None or c.allocation.batch_rollouts <= max_batch]
    if not fitting:
        smallest = min(curve.allocation.batch_rollouts for curve in analysis.curves)
        raise UserError(
            f"--max-batch: {max_batch} is below the smallest batch with a curve; give at least {smallest}"
        )
    groups = {group.allocation: group for group in analysis.groups}
    in_rollouts = analysis.options.compute == "rollouts"
    curves, found = [], []
    for curve in fitting:
        allocation, group = curve.allocation, groups[curve.allocation]
        rollouts = budget if in_rollouts else rollouts_within(group, budget)
        steps = int(rollouts / allocation.batch_rollouts + 1e-9)
        if steps < 1:
            continue
        used = steps * allocation.batch_rollouts
        compute = float(used) if in_rollouts else compute_for(group, used)
        first, last = curve.fit.compute_min, curve.fit.compute_max
        curves.append(curve)
        found.append(
            Candidate(
                allocation=allocation,
                update_steps=steps,
                compute=compute,
                learning_rate=learning_rate(analysis, allocation),
                reward=float(curve.fit.predict(compute)),
                reward_interval=None,
                difference=0.0,
                difference_interval=None,
                best_share=None,
                observed=first / REACH <= compute <= last * REACH,
                observed_compute=(first, last),
            )
        )
    if not found:
        smallest = min(curve.allocation.batch_rollouts for curve in fitting)
        raise UserError(
            f"--budget: {budget_words(budget, analysis.options.compute)} does not pay for one step of the smallest batch "
            f"({smallest} rollouts); give more"
        )
    return curves, found


def optimiser_of(spec: dict[str, Any] | None) -> OptimiserSpec | None:
    """The grid's optimiser; None where the tables have no grid, or one that cannot be read (a complaint there)."""
    try:
        return OptimiserSpec.model_validate((spec or {}).get("optimiser"))
    except ValidationError:
        return None


def observed_rates(analysis: Analysis, allocation: Allocation) -> Array:
    """Learning rates of an allocation's rows, by step; empty where the table has none."""
    history = analysis.tables.history
    if "learning_rate" not in history.columns:
        return np.empty(0)
    rows = history[
        (history["rollouts_per_problem"] == allocation.rollouts_per_problem)
        & (history["problems_per_batch"] == allocation.problems_per_batch)
    ].sort_values("step", kind="stable")
    return rows["learning_rate"].dropna().to_numpy(dtype=np.float64)


def learning_rate(analysis: Analysis, allocation: Allocation) -> float | None:
    """The grid's rule where there is a grid, else the allocation's last observed rate."""
    optimiser = optimiser_of(analysis.tables.spec)
    if optimiser is not None:
        return scaled_learning_rate(optimiser, allocation.batch_rollouts)
    rates = observed_rates(analysis, allocation)
    return float(rates[-1]) if len(rates) else None

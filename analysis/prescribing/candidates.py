"""The allocations that are ranked at a budget: steps, learning rate and expected metric of each.

What was observed bounds what is answered. An allocation is not ranked before its first evaluation or with a handful of
steps, it competes by an extrapolated curve only near its last evaluation, and a budget far beyond the grid is refused: a
curve's level at large compute rests on few evaluations, and at thousands of times the observed compute nothing else is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from analysis.findings import Analysis
from analysis.fitting.curves import AllocationCurve
from analysis.fitting.intervals import Interval
from analysis.fitting.landscape import END_SHARE
from analysis.fitting.logistic import Array
from analysis.fitting.observations import MIN_POINTS, Allocation, Observations
from analysis.prescribing.budgets import budget_words, compute_for, rollouts_within, surely_pays_for
from grids.errors import UserError
from grids.expansion import scaled_learning_rate
from grids.spec import OptimiserSpec

REACH = 1.05
"""An allocation counts as observed this factor beyond its evaluations: cells of one budget are evaluated last within a
batch of each other, so the exact end of a range says nothing."""

MOST_BEYOND = 4.0
"""The largest budget that is answered, in multiples of the largest observed compute: as far as the held-out check tests."""

MOST_BEYOND_OWN = MOST_BEYOND / END_SHARE
"""How many times its own last evaluation an allocation competes at: whatever ran to the end reaches the largest budget."""

FEWEST_STEPS = 4
"""An allocation that makes fewer update steps is not ranked."""

_ROUNDING = 1e-3  # amounts in messages have four digits; an amount given back as it was printed is accepted


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


def candidates_at(
    analysis: Analysis, budget: float, max_batch: int | None
) -> tuple[list[AllocationCurve], list[Candidate]]:
    """The allocations that are ranked at a budget, by n and B_p, and their curves.

    Those under a largest batch that make FEWEST_STEPS and reach their first evaluation. They are not compared yet: what compares
    has no value. Raises UserError when there is no curve or no batch small enough, when the budget is more than MOST_BEYOND times
    what was observed, and when no allocation competes.
    """
    name, unit = analysis.tables.name, analysis.options.compute
    if not analysis.curves:
        raise UserError(
            f"{name}: no allocation has a curve of {analysis.metric} in {unit}, so nothing can "
            f"be prescribed; train until a cell has at least {MIN_POINTS} evaluations"
        )
    fitting = [c for c in analysis.curves if max_batch is None or c.allocation.batch_rollouts <= max_batch]
    if not fitting:
        smallest = min(curve.allocation.batch_rollouts for curve in analysis.curves)
        raise UserError(
            f"--max-batch: {max_batch} is below the smallest batch with a curve; give at least {smallest}"
        )
    _refuse_far_beyond(analysis, budget, max(curve.fit.compute_max for curve in fitting))
    groups = {group.allocation: group for group in analysis.groups}
    ranked = [(c, _candidate(analysis, c, groups[c.allocation], budget)) for c in fitting]
    curves = [curve for curve, candidate in ranked if candidate is not None]
    found = [candidate for _, candidate in ranked if candidate is not None]
    if not competing(found).any():
        starts = [smallest_budget(groups[curve.allocation]) for curve in fitting]
        smallest_words = budget_words(
            min([start for start in starts if start > budget] or starts) * (1.0 + _ROUNDING), unit
        )
        raise UserError(
            f"--budget: {budget_words(budget, unit)} is too early in {name}: no allocation was evaluated there, or shortly before, "
            f"after at least {FEWEST_STEPS} steps; the smallest budget to prescribe for is {smallest_words}: give that"
        )
    return curves, found


def competing(candidates: Sequence[Candidate]) -> NDArray[np.bool_]:
    """Which of the candidates compete: those observed at the budget, or if none was, those that end near it."""
    observed = np.array([candidate.observed for candidate in candidates], dtype=bool)
    near = np.array([candidate.beyond <= MOST_BEYOND_OWN for candidate in candidates], dtype=bool)
    return observed if observed.any() else near


def smallest_budget(group: Observations) -> float:
    """From which budget on an allocation is ranked: its first evaluation, and FEWEST_STEPS; in the unit of ``group.compute``."""
    batch = group.allocation.batch_rollouts
    first = max(float(group.of_cell(index).rollouts.min()) for index in range(len(group.cells)))
    return surely_pays_for(group, max(first, FEWEST_STEPS * batch))


def _candidate(
    analysis: Analysis, curve: AllocationCurve, group: Observations, budget: float
) -> Candidate | None:
    """An allocation at the budget; None where it is not ranked."""
    allocation, in_rollouts = curve.allocation, analysis.options.compute == "rollouts"
    rollouts = budget if in_rollouts else rollouts_within(group, budget)
    steps = int(rollouts / allocation.batch_rollouts + 1e-9)
    used = steps * allocation.batch_rollouts
    compute = float(used) if in_rollouts else compute_for(group, used)
    first, last = curve.fit.compute_min, curve.fit.compute_max
    if steps < FEWEST_STEPS or compute < first / REACH:
        return None
    return Candidate(
        allocation=allocation,
        update_steps=steps,
        compute=compute,
        learning_rate=learning_rate(analysis, allocation),
        reward=float(curve.fit.predict(compute)),
        reward_interval=None,
        difference=0.0,
        difference_interval=None,
        best_share=None,
        observed=compute <= last * REACH,
        observed_compute=(first, last),
    )


def _refuse_far_beyond(analysis: Analysis, budget: float, observed: float) -> None:
    """Refuse a budget of more than MOST_BEYOND times the largest observed compute."""
    if budget <= MOST_BEYOND * observed * (1.0 + _ROUNDING):
        return
    unit, law = analysis.options.compute, analysis.frontier.law.fit
    hint = f"; the law, which is no prescription, says n = {float(law.predict(budget)):.0f}" if law else ""
    raise UserError(
        f"--budget: {budget_words(budget, unit)} is {_times(budget / observed)} times the largest observed compute of "
        f"{analysis.tables.name} ({budget_words(observed, unit)}), where a curve says nothing; the largest budget to prescribe "
        f"for is {budget_words(MOST_BEYOND * observed, unit)}: give that, or extend the grid{hint}"
    )


def _times(factor: float) -> str:
    """A factor in about three digits, without an exponent."""
    return f"{factor:.3g}" if factor < 1000.0 else f"{float(f'{factor:.3g}'):,.0f}"


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

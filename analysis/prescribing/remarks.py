"""What to keep in mind about a prescription, in words."""

from collections.abc import Sequence

import numpy as np

from analysis.findings import Analysis
from analysis.fitting.observations import Allocation
from analysis.prescribing.budgets import budget_words
from analysis.prescribing.candidates import (
    FEWEST_STEPS,
    MOST_BEYOND_OWN,
    REACH,
    Candidate,
    observed_rates,
    optimiser_of,
    smallest_budget,
)

FEW_STEPS = 20
"""Fewer update steps are remarked upon; where the warm-up is known, fewer than twice the warm-up are."""

_MOST_NAMED = 3


def extrapolation_warning(analysis: Analysis, best: Candidate) -> str | None:
    """How far the best allocation is beyond its observations, and what the held-out check says of that; None within them."""
    if best.observed:
        return None
    unit, check = analysis.options.compute, analysis.held_out
    last = budget_words(best.observed_compute[1], unit)
    words = (
        f"extrapolates: no allocation was observed at this budget, which is {best.beyond:.3g} times the last evaluation of "
        f"{best.allocation.name} ({last}); "
    )
    if check is None or check.reward_error is None:
        words += "no held-out check of that: too few allocations have small budgets enough for a curve"
    else:
        factor = float(check.table["compute"].max()) / check.fitted_to
        words += (
            f"held-out check: curves fitted up to {budget_words(check.fitted_to, unit)} miss the best reward by "
            f"{check.reward_error:.3f} on average up to {factor:.3g} times as much compute, and their choice loses "
            f"{check.table['regret'].mean():.3f}"
        )
    return words


def remarks_on(
    analysis: Analysis,
    budget: float,
    best: Candidate,
    rivals: Sequence[Candidate],
    not_observed: Sequence[Candidate],
    law_n: float | None,
) -> list[str]:
    """One sentence each. rivals compete with the best, not_observed do not; law_n is the law's, where it is identified."""
    competing_n = {candidate.allocation.rollouts_per_problem for candidate in (best, *rivals)}
    return [
        *_on_range(analysis, best, not_observed),
        *_on_late_starts(analysis, budget, {c.allocation for c in (best, *rivals, *not_observed)}),
        *_on_comparison(analysis, best.allocation, competing_n, law_n),
        *_on_steps(analysis, budget, best),
        *_on_intervals(analysis),
    ]


def _on_range(analysis: Analysis, best: Candidate, not_observed: Sequence[Candidate]) -> list[str]:
    """Rivals that ended before the budget, and the curve where it is extrapolated."""
    unit = analysis.options.compute
    if best.observed:
        ahead = [rival for rival in not_observed if rival.reward > best.reward]
        return [
            f"{rival.allocation.name} was observed only from {budget_words(rival.observed_compute[0], unit)} to "
            f"{budget_words(rival.observed_compute[1], unit)}; by its extrapolated curve it would lead with {rival.reward:.3f}"
            for rival in ahead[:1]
        ]
    remarks = [
        "the intervals hold the noise of the scores, not whether the curve's form holds beyond the last evaluation"
    ]
    curve = next(curve for curve in analysis.curves if curve.allocation == best.allocation)
    if curve.fit.on_bound:
        remarks.append(
            f"the curve of {best.allocation.name} rests on a bound: {', '.join(curve.fit.on_bound)}"
        )
    if not_observed:
        remarks.append(
            f"not compared: {_names([rival.allocation.name for rival in not_observed])}, evaluated last at less than "
            f"1/{MOST_BEYOND_OWN:g} of the budget"
        )
    return remarks


def _on_late_starts(analysis: Analysis, budget: float, ranked: set[Allocation]) -> list[str]:
    """Allocations that are not ranked, because the budget does not reach their first evaluation or pays for too few steps."""
    starts = {group.allocation: group for group in analysis.groups}
    late = [curve.allocation for curve in analysis.curves if curve.allocation not in ranked]
    named = [
        f"{allocation.name} (from {budget_words(start, analysis.options.compute)})"
        for allocation in late
        if (start := smallest_budget(starts[allocation])) > budget
    ]
    if not named:
        return []
    return [
        f"not ranked before the first evaluation and with fewer than {FEWEST_STEPS} steps: {_names(named)}"
    ]


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _on_comparison(
    analysis: Analysis, best: Allocation, competing_n: set[int], law_n: float | None
) -> list[str]:
    """What the best was compared with: other n, the edges of the grid, the law."""
    remarks = []
    if len(competing_n) == 1:
        remarks.append(f"only n = {best.rollouts_per_problem} competes at this budget, so it is not compared")
    untried = _untried_neighbours(best, [curve.allocation for curve in analysis.curves])
    if untried:
        remarks.append(
            f"{best.name} lies on the grid's edge: beside it no {' and no '.join(untried)} was tried"
        )
    if law_n is not None and abs(np.log2(law_n / best.rollouts_per_problem)) > 1.0:
        remarks.append(
            f"the law says n = {law_n:.0f} and the curves n = {best.rollouts_per_problem}: more than a factor 2 apart"
        )
    return remarks


def _untried_neighbours(best: Allocation, grid: Sequence[Allocation]) -> list[str]:
    """In which directions the grid ends at an allocation, along axes on which it has several values."""
    n, problems = best.rollouts_per_problem, best.problems_per_batch
    found = []
    for name, value, line, everywhere in (
        (
            "n",
            n,
            {a.rollouts_per_problem for a in grid if a.problems_per_batch == problems},
            {a.rollouts_per_problem for a in grid},
        ),
        (
            "B_p",
            problems,
            {a.problems_per_batch for a in grid if a.rollouts_per_problem == n},
            {a.problems_per_batch for a in grid},
        ),
    ):
        if len(everywhere) > 1:
            found += [f"larger {name}"] * (value == max(line)) + [f"smaller {name}"] * (value == min(line))
    return found


def _on_steps(analysis: Analysis, budget: float, best: Candidate) -> list[str]:
    """Steps and learning rate."""
    remarks = []
    optimiser = optimiser_of(analysis.tables.spec)
    warmup = optimiser.warmup_steps if optimiser else None
    if best.update_steps < (FEW_STEPS if warmup is None else 2 * warmup):
        known = "" if warmup is None else f", of which {min(warmup, best.update_steps)} are warm-up"
        remarks.append(f"only {best.update_steps} update steps{known}")
    if best.compute < budget / REACH:
        remarks.append(f"whole steps use {best.compute / budget:.0%} of the budget")
    if best.learning_rate is None:
        remarks.append("learning rate not known: the tables have neither a grid nor a column learning_rate")
    rates = observed_rates(analysis, best.allocation)
    if len(rates) and rates[-1] < 0.999 * rates.max():
        remarks.append(
            f"the learning rate of {best.allocation.name} falls ({rates.max():.3g} to {rates[-1]:.3g}), so a shorter run is not "
            f"the first part of a longer one, and its curve says little about other budgets"
        )
    if analysis.options.compute == "accelerator_seconds":
        remarks.append(
            "accelerator time holds for the hardware and the pools that these cells were trained on"
        )
    return remarks


def _on_intervals(analysis: Analysis) -> list[str]:
    resampling = analysis.resampling
    if not resampling.replicates:
        return ["no intervals: no replicates were asked for"]
    lead = "not in the intervals" if resampling.over else "no intervals"
    return [f"{lead}: {words}" for words in resampling.missing]

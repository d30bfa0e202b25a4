"""What to train with a new budget: n, B_p, M and the learning rate, from the curves of an analysed grid.

Each allocation is judged by its curve at the compute that whole steps of it use. Where some allocations were
observed at the budget only they compete. Beyond (or before) every observation all compete by extrapolated curves, and the
prescription says so: the bootstrap's intervals hold the noise of the scores and not whether the curve's form
holds there, of which the held-out-budget check is the honest measure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.findings import Analysis
from analysis.fitting.curves import AllocationCurve
from analysis.fitting.intervals import Interval, interval
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation
from analysis.options import ComputeUnit
from analysis.prescribing.budgets import budget_words
from analysis.prescribing.candidates import REACH, Candidate, affordable, observed_rates, optimiser_of

RUNNERS_UP = 5
"""How many allocations are named beside the best."""

FEW_STEPS = 20
"""Fewer update steps are remarked upon; where the warm-up is known, fewer than twice the warm-up are."""


@dataclass(frozen=True)
class Prescription:
    """What to train with a budget, and how far to trust it."""

    setting: str
    """Name of the tables."""
    metric: str
    budget: float
    unit: ComputeUnit
    confidence: float
    """Level of every interval."""
    best: Candidate
    """Equal rewards go to the smaller n, then to the smaller B_p."""
    runners_up: tuple[Candidate, ...]
    """The next best of those that compete, at most RUNNERS_UP."""
    not_observed: tuple[Candidate, ...]
    """Allocations that do not compete, because others were observed at the budget and they were not; by their extrapolated
    curves, best first."""
    competitors: int
    """How many allocations compete, the best included."""
    n_interval: Interval | None
    """Of the best n."""
    n_share: float | None
    """In which share of the replicates the best allocation has this n."""
    not_worse_n: tuple[int, ...] | None
    """The values of n with an allocation that cannot be told from the best."""
    law_n: float | None
    """n by the allocation law; None where the law is not identified."""
    law_n_interval: Interval | None
    remarks: tuple[str, ...]
    """What to keep in mind, one sentence each."""

    @property
    def extrapolates(self) -> bool:
        """Whether no allocation was observed at the budget."""
        return not self.best.observed


def prescribe(analysis: Analysis, budget: float, max_batch_rollouts: int | None = None) -> Prescription:
    """The allocation with the largest expected metric at a budget.

    budget: in the unit of ``analysis.options.compute``, above 0. max_batch_rollouts: the largest batch B to consider.
    Raises UserError when no allocation has a curve, fits under max_batch_rollouts, or can make one step.
    """
    confidence = analysis.options.confidence
    curves, candidates = affordable(analysis, budget, max_batch_rollouts)
    competes = np.array([candidate.observed for candidate in candidates])
    competes = competes if competes.any() else np.ones_like(competes)
    rewards = np.array([candidate.reward for candidate in candidates])
    top = int(np.where(competes, rewards, -np.inf).argmax())
    replicates = _replicates(curves, candidates)
    winners = None
    if replicates is not None:
        winners = np.where(competes[:, None], replicates, -np.inf).argmax(axis=0)
    compared = [
        replace(
            candidate,
            difference=candidate.reward - candidates[top].reward,
            reward_interval=None if replicates is None else interval(replicates[i], confidence),
            difference_interval=None
            if replicates is None or i == top
            else interval(replicates[i] - replicates[top], confidence),
            best_share=None if winners is None or not competes[i] else float((winners == i).mean()),
        )
        for i, candidate in enumerate(candidates)
    ]
    ranked = [compared[i] for i in np.argsort(-rewards, kind="stable") if i != top]
    best = compared[top]
    rivals = [rival for rival in ranked if rival.observed or not best.observed]
    not_observed = [rival for rival in ranked if best.observed and not rival.observed]
    n = np.array([candidate.allocation.rollouts_per_problem for candidate in candidates])
    n_interval = n_share = not_worse = None
    if winners is not None:
        tail = (1.0 - confidence) / 2.0
        low, high = np.quantile(n[winners], (tail, 1.0 - tail), method="inverted_cdf")
        n_interval = (float(low), float(high))
        n_share = float((n[winners] == n[top]).mean())
        close = [best, *(rival for rival in rivals if not rival.told_from_best)]
        not_worse = tuple(sorted({candidate.allocation.rollouts_per_problem for candidate in close}))
    law_n, law_n_interval = _law_at(analysis, budget)
    prescription = Prescription(
        setting=analysis.tables.name,
        metric=analysis.metric,
        budget=budget,
        unit=analysis.options.compute,
        confidence=confidence,
        best=best,
        runners_up=tuple(rivals[:RUNNERS_UP]),
        not_observed=tuple(not_observed),
        competitors=1 + len(rivals),
        n_interval=n_interval,
        n_share=n_share,
        not_worse_n=not_worse,
        law_n=law_n,
        law_n_interval=law_n_interval,
        remarks=(),
    )
    competing_n = {candidate.allocation.rollouts_per_problem for candidate in (best, *rivals)}
    return replace(prescription, remarks=tuple(_remarks(prescription, analysis, competing_n)))


def _replicates(curves: Sequence[AllocationCurve], candidates: Sequence[Candidate]) -> Array | None:
    """(A, R) rewards of the bootstrap replicates."""
    if any(curve.replicates is None for curve in curves):
        return None
    at = zip(curves, candidates, strict=True)
    return np.stack([curve.predict_replicates([candidate.compute])[0] for curve, candidate in at])


def _law_at(analysis: Analysis, budget: float) -> tuple[float | None, Interval | None]:
    """n by the law of the first question, and its interval."""
    law = analysis.frontier.law
    if law.fit is None:
        return None, None
    return float(law.fit.predict(budget)), law.n_interval(budget, analysis.options.confidence)


def _remarks(prescription: Prescription, analysis: Analysis, competing_n: set[int]) -> list[str]:
    best = prescription.best
    return [
        *_on_range(prescription, analysis),
        *_on_comparison(prescription, analysis, competing_n),
        *_on_steps(best, prescription, analysis),
        *_on_intervals(analysis),
    ]


def _on_range(prescription: Prescription, analysis: Analysis) -> list[str]:
    """Extrapolation, and rivals that were not observed."""
    best, unit = prescription.best, prescription.unit
    first, last = (budget_words(value, unit) for value in best.observed_compute)
    if not prescription.extrapolates:
        ahead = [rival for rival in prescription.not_observed if rival.reward > best.reward]
        return [
            f"{rival.allocation.name} was observed only from {budget_words(rival.observed_compute[0], unit)} to "
            f"{budget_words(rival.observed_compute[1], unit)}; by its extrapolated curve it would lead with {rival.reward:.3f}"
            for rival in ahead[:1]
        ]
    if best.beyond < 1.0:
        return [
            f"extrapolates: no allocation was observed at this budget; the first evaluation of {best.allocation.name} is at {first}"
        ]
    remarks = [
        f"extrapolates: no allocation was observed at this budget, which is {best.beyond:.3g} times the last evaluation of "
        f"{best.allocation.name} ({last}); the intervals hold the noise of the scores, not whether the curve's form holds there"
    ]
    check = analysis.held_out
    if check is None or check.reward_error is None:
        remarks.append(
            "no held-out check of extrapolation: too few allocations have small budgets enough for a curve"
        )
    else:
        factor = float(check.table["compute"].max()) / check.fitted_to
        remarks.append(
            f"held-out check of extrapolation: curves fitted up to {budget_words(check.fitted_to, unit)} miss the best reward by "
            f"{check.reward_error:.3f} on average up to {factor:.3g} times as much compute, and their choice loses "
            f"{check.table['regret'].mean():.3f}"
        )
    curve = next(curve for curve in analysis.curves if curve.allocation == best.allocation)
    if curve.fit.on_bound:
        remarks.append(
            f"the curve of {best.allocation.name} rests on a bound: {', '.join(curve.fit.on_bound)}"
        )
    return remarks


def _on_comparison(prescription: Prescription, analysis: Analysis, competing_n: set[int]) -> list[str]:
    """What the best was compared with: other n, the edges of the grid, the law."""
    best = prescription.best.allocation
    remarks = []
    if len(competing_n) == 1:
        remarks.append(f"only n = {best.rollouts_per_problem} competes at this budget, so it is not compared")
    untried = _untried_neighbours(best, [curve.allocation for curve in analysis.curves])
    if untried:
        remarks.append(
            f"{best.name} lies on the grid's edge: beside it no {' and no '.join(untried)} was tried"
        )
    law_n = prescription.law_n
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


def _on_steps(best: Candidate, prescription: Prescription, analysis: Analysis) -> list[str]:
    """Steps and learning rate."""
    remarks = []
    optimiser = optimiser_of(analysis.tables.spec)
    warmup = optimiser.warmup_steps if optimiser else None
    if best.update_steps < (FEW_STEPS if warmup is None else 2 * warmup):
        known = "" if warmup is None else f", of which {min(warmup, best.update_steps)} are warm-up"
        remarks.append(f"only {best.update_steps} update steps{known}")
    if best.compute < prescription.budget / REACH:
        remarks.append(f"whole steps use {best.compute / prescription.budget:.0%} of the budget")
    if best.learning_rate is None:
        remarks.append("learning rate not known: the tables have neither a grid nor a column learning_rate")
    rates = observed_rates(analysis, best.allocation)
    if len(rates) and rates[-1] < 0.999 * rates.max():
        remarks.append(
            f"the learning rate of {best.allocation.name} falls ({rates.max():.3g} to {rates[-1]:.3g}), so a shorter run is not "
            f"the first part of a longer one, and its curve says little about other budgets"
        )
    if prescription.unit == "accelerator_seconds":
        remarks.append(
            "accelerator time holds for the hardware and the pools that these cells were trained on"
        )
    return remarks


def _on_intervals(analysis: Analysis) -> list[str]:
    resampling = analysis.resampling
    lead = "not in the intervals" if resampling.over else "no intervals"
    return [f"{lead}: {words}" for words in resampling.missing]

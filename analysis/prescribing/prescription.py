"""What to train with a new budget: n, B_p, M and the learning rate, from the curves of an analysed grid.

Each allocation is judged by its curve at the compute that whole steps of it use. Where some allocations were
observed at the budget only they compete. Beyond every observation, up to a bound, those compete by extrapolated curves that
end near the budget, and the prescription leads with a warning: the bootstrap's intervals hold the noise of the scores and not
whether the curve's form holds there, of which the held-out-budget check is the honest measure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analysis.findings import Analysis
from analysis.fitting.curves import AllocationCurve
from analysis.fitting.intervals import Interval, interval
from analysis.fitting.landscape import best_of_replicates
from analysis.fitting.logistic import Array
from analysis.options import ComputeUnit
from analysis.prescribing.candidates import Candidate, candidates_at, competing
from analysis.prescribing.remarks import extrapolation_warning, remarks_on

RUNNERS_UP = 5
"""How many allocations are named beside the best."""


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
    """Allocations that ended before the budget and do not compete, because others were observed there or ended nearer; by their
    extrapolated curves, best first."""
    competitors: int
    """How many allocations compete, the best included."""
    n_interval: Interval | None
    """Of the best n."""
    n_share: float | None
    """In which share of the replicates this n is the best, by whichever B_p."""
    not_worse_n: tuple[int, ...] | None
    """The values of n with an allocation that cannot be told from the best."""
    law_n: float | None
    """n by the allocation law; None where the law is not identified."""
    law_n_interval: Interval | None
    warning: str | None
    """That and how far the prescription extrapolates, and what the held-out check says of that; None where it does not."""
    remarks: tuple[str, ...]
    """What to keep in mind, one sentence each."""

    @property
    def extrapolates(self) -> bool:
        """Whether no allocation was observed at the budget."""
        return not self.best.observed


def prescribe(analysis: Analysis, budget: float, max_batch_rollouts: int | None = None) -> Prescription:
    """The allocation with the largest expected metric at a budget.

    budget: in the unit of ``analysis.options.compute``, above 0. max_batch_rollouts: the largest batch B to consider.
    Raises UserError when no allocation has a curve or fits under max_batch_rollouts, and for a budget below the first evaluations
    or beyond ``candidates.MOST_BEYOND`` times the observed compute.
    """
    confidence = analysis.options.confidence
    curves, candidates = candidates_at(analysis, budget, max_batch_rollouts)
    competes = competing(candidates)
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
    ranked = [i for i in np.argsort(-rewards, kind="stable") if i != top]
    best = compared[top]
    rivals = [compared[i] for i in ranked if competes[i]]
    not_observed = [compared[i] for i in ranked if not competes[i]]
    n = np.array([candidate.allocation.rollouts_per_problem for candidate in candidates])
    n_interval = n_share = not_worse = None
    if replicates is not None:
        tail = (1.0 - confidence) / 2.0
        n_star = _best_n(n, rewards, replicates, competes)
        low, high = np.quantile(n_star, (tail, 1.0 - tail), method="inverted_cdf")
        n_interval = (float(low), float(high))
        n_share = float((n_star == n[top]).mean())
        close = [best, *(rival for rival in rivals if not rival.told_from_best)]
        not_worse = tuple(sorted({candidate.allocation.rollouts_per_problem for candidate in close}))
    law_n, law_n_interval = _law_at(analysis, budget)
    return Prescription(
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
        warning=extrapolation_warning(analysis, best),
        remarks=tuple(remarks_on(analysis, budget, best, rivals, not_observed, law_n)),
    )


def _replicates(curves: Sequence[AllocationCurve], candidates: Sequence[Candidate]) -> Array | None:
    """(A, R) rewards of the bootstrap replicates."""
    if any(curve.replicates is None for curve in curves):
        return None
    at = zip(curves, candidates, strict=True)
    return np.stack([curve.predict_replicates([candidate.compute])[0] for curve, candidate in at])


def _best_n(n: Array, rewards: Array, replicates: Array, competes: NDArray[np.bool_]) -> Array:
    """(R,) the best n in each replicate, as along the frontier; from (A,), (A,), (A, R) and (A,)."""
    values = np.unique(n[competes])
    best = [
        best_of_replicates(rewards[own, None], replicates[own, None, :], competes[own, None])[0]
        for own in (n == value for value in values)
    ]
    return np.asarray(values[np.stack(best).argmax(axis=0)])


def _law_at(analysis: Analysis, budget: float) -> tuple[float | None, Interval | None]:
    """n by the law of the first question, and its interval."""
    law = analysis.frontier.law
    if law.fit is None:
        return None, None
    return float(law.fit.predict(budget)), law.n_interval(budget, analysis.options.confidence)

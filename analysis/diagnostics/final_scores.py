"""What every allocation scores at one common compute near the end, for comparisons between allocations.

The common compute is the largest that at least half of the allocations (and at least two) reach, so a grid that is
still running is compared where most of it stands, and budgets in tokens or seconds, in which cells end apart, are
compared where they overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.diagnostics.sensitivity import best_n_by_metric, sensitivity
from analysis.findings import Analysis
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation, Observations, observe
from analysis.fitting.resampling import Resampling, plan_resampling
from analysis.tables import COMPUTE_COLUMNS, is_metric, metric_columns, samples_per_problem


@dataclass(frozen=True)
class FinalScores:
    """Scores of A allocations at one compute."""

    compute: float
    """In the unit of the fit."""
    allocations: tuple[Allocation, ...]
    """By n and B_p; only those observed at ``compute``."""
    scores: dict[str, Array]
    """By metric, shape (A, 1 + R): column 0 is the estimate, the others are bootstrap replicates (R = 0: none).
    NaN where an allocation has no score of this metric there."""

    @property
    def problems_per_batch(self) -> list[int]:
        """B_p of each allocation."""
        return [allocation.problems_per_batch for allocation in self.allocations]

    @property
    def rollouts_per_problem(self) -> list[int]:
        """n of each allocation."""
        return [allocation.rollouts_per_problem for allocation in self.allocations]


def common_compute(groups: Sequence[Observations]) -> float | None:
    """The largest compute that at least half of the allocations, and at least two, reach; None for fewer than
    two allocations."""
    if len(groups) < 2:
        return None
    ends = sorted((float(group.compute.max()) for group in groups), reverse=True)
    return ends[max((len(ends) + 1) // 2, 2) - 1]


def observed_scores(analysis: Analysis) -> FinalScores | None:
    """The evaluations nearest to the common compute, for avg, best and worst of the analysis' K (for a metric
    of another kind: it and all validation metrics of the table). None for fewer than two allocations.

    An allocation's score is the mean over its cells' evaluations nearest in log C, each within one mark of the
    common compute. Replicates use the analysis' draws of problems and seeds. A single row is noisier than a
    curve through all of them: for the metric that was fitted, ``fitted_scores`` is the sharper one.
    """
    compute = common_compute(analysis.groups)
    if compute is None:
        return None
    history, column = analysis.tables.history, COMPUTE_COLUMNS[analysis.options.compute]
    drawn = len(analysis.resampling.over) > 0
    found: dict[str, dict[Allocation, Array]] = {}
    for metric in _compared_metrics(analysis):
        groups, resampling = analysis.groups, analysis.resampling
        if metric != analysis.metric:
            groups, _ = observe(history, metric, column, with_scores=drawn)
            # The same draws: they depend on the seed, the number of problems and the allocations only.
            resampling = plan_resampling(groups, resampling.replicates, resampling.seed)
        rows = {group.allocation: _scores_at(group, compute, resampling, drawn) for group in groups}
        found[metric] = {allocation: row for allocation, row in rows.items() if row is not None}
    allocations = tuple(sorted({allocation for rows in found.values() for allocation in rows}))
    missing = np.full(1 + analysis.resampling.replicates * drawn, np.nan)
    scores = {
        metric: np.array([rows.get(allocation, missing) for allocation in allocations])
        for metric, rows in found.items()
    }
    return FinalScores(compute, allocations, scores)


def fitted_scores(analysis: Analysis) -> FinalScores | None:
    """The curves of the fitted metric at the common compute, of the allocations observed there (within one
    mark); None for fewer than two allocations."""
    compute = common_compute(analysis.groups)
    if compute is None:
        return None
    reached = {group.allocation for group in analysis.groups if _nearest(group, compute)}
    curves = [curve for curve in analysis.curves if curve.allocation in reached]
    columns = []
    for curve in curves:
        estimate = curve.fit.predict([compute])
        replicates = [] if curve.replicates is None else curve.predict_replicates([compute])[0]
        columns.append(np.append(estimate, replicates))
    return FinalScores(
        compute, tuple(curve.allocation for curve in curves), {analysis.metric: np.array(columns)}
    )


def sensitivity_table(analysis: Analysis) -> pd.DataFrame:
    """How much the fitted reward at the common compute depends on n and on B_p, against noise.

    One row for each quantity of ``Sensitivity``, in its order; a quantity without two values to compare is left
    out. Columns: quantity, points (0.01 of reward), low and high (interval), noise and noise_high (median and upper
    bound at the interval's confidence of the same range among allocations that are all equal); NaN without replicates.

    A range is never negative, so noise pushes it upwards, in the estimate and once more in the replicates. The
    interval is therefore the basic one, 2 * estimate minus the replicates' quantiles, which pulls it back, cut at
    0. ``noise`` is the range over replicates that are centred on the mean of each allocation: their differences
    are noise alone, with the dependence that common validation problems give.
    """
    names = ["within_n", "within_problems", "best_n", "best_problems"]
    columns = ["quantity", "points", "low", "high", "noise", "noise_high"]
    final = fitted_scores(analysis)
    if final is None or not final.allocations:
        return pd.DataFrame(columns=columns)
    scores = final.scores[analysis.metric]
    shape = (final.problems_per_batch, final.rollouts_per_problem)
    found = sensitivity(*shape, scores)
    replicates = scores[:, 1:]
    equal = (
        sensitivity(*shape, replicates - replicates.mean(axis=1, keepdims=True)) if replicates.size else None
    )
    tail = (1.0 - analysis.options.confidence) / 2.0
    rows = []
    for name in names:
        values = getattr(found, name)
        if np.isnan(values[0]):
            continue
        numbers = [np.nan] * 4
        if equal is not None:
            low, high = np.quantile(values[1:], (tail, 1.0 - tail))
            noise, noise_high = np.quantile(getattr(equal, name), (0.5, 1.0 - tail))
            numbers = [max(2 * values[0] - high, 0.0), max(2 * values[0] - low, 0.0), noise, noise_high]
        rows.append((name, float(values[0]), *(float(number) for number in numbers)))
    return pd.DataFrame(rows, columns=columns)


def best_n_table(analysis: Analysis) -> pd.DataFrame:
    """The best n at each B_p for avg, best and worst at the common compute; columns as in ``best_n_by_metric``.
    Empty for fewer than two allocations."""
    final = observed_scores(analysis)
    if final is None or not final.allocations:
        return best_n_by_metric([], [], {})
    return best_n_by_metric(
        final.problems_per_batch, final.rollouts_per_problem, final.scores, analysis.options.confidence
    )


def _compared_metrics(analysis: Analysis) -> list[str]:
    known = metric_columns(analysis.tables.history)
    if not is_metric(analysis.metric):
        return [analysis.metric, *known]
    answers = samples_per_problem(analysis.metric)
    return [name for name in known if samples_per_problem(name) == answers] or [analysis.metric]


def _nearest(group: Observations, compute: float) -> list[int]:
    """The evaluation nearest to ``compute`` of each cell that has one within a mark; a mark is the allocation's
    median or last distance between evaluations in log C, whichever is larger."""
    marks = np.diff(np.log(np.unique(group.compute)))
    width = max(float(np.median(marks)), float(marks[-1])) * (1.0 + 1e-9)
    distance = np.abs(np.log(group.compute / compute))
    rows = [np.flatnonzero(group.cell_index == index) for index in range(len(group.cells))]
    nearest = [int(own[distance[own].argmin()]) for own in rows if len(own)]
    return [row for row in nearest if distance[row] <= width]


def _scores_at(group: Observations, compute: float, resampling: Resampling, drawn: bool) -> Array | None:
    """(1 + R,) estimate and replicates, (1,) where nothing is drawn; None when no cell of the allocation was
    evaluated there."""
    rows = _nearest(group, compute)
    if not rows:
        return None
    estimate = float(group.reward[rows].mean())
    if not drawn:
        return np.array([estimate])
    rewards, weights, raw = resampling.drawn_rewards(group)[rows], resampling.problem_weights, group.scores
    if len(rows) == 1 and raw is not None and weights is not None and raw.shape[1] == len(weights):
        # One evaluation has no spread over seeds to hold the luck of its answers, so its raw scores must.
        rewards = raw[rows] @ weights
    there = _only(group, rows)
    drawn_rewards = rewards + resampling.drawn_seeds(there, there.reward - estimate)
    return np.append(estimate, np.broadcast_to(drawn_rewards.mean(axis=0), resampling.replicates))


def _only(group: Observations, rows: list[int]) -> Observations:
    """Some evaluations, each of another cell, of these cells alone."""
    cells = group.cell_index[rows]
    return Observations(
        allocation=group.allocation,
        cells=tuple(group.cells[cell] for cell in cells),
        seeds=tuple(group.seeds[cell] for cell in cells),
        cell_index=np.arange(len(rows)),
        compute=group.compute[rows],
        rollouts=group.rollouts[rows],
        reward=group.reward[rows],
        scores=None if group.scores is None else group.scores[rows],
    )

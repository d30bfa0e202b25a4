"""One bounded monotone sigmoid of reward in compute for each allocation, and for each cell.

    R(C) = R0 + (A - R0) / (1 + (Cmid / C)^s),   0 <= R0 <= A <= 1, s > 0

R0 is the reward at C = 0, A the ceiling, Cmid the compute at half the gain and s the steepness. It is a
logistic curve in log C, so it is monotone by construction: a curve that falls is fitted by a level line, and
its RMSE and the isotonic regression beside it tell.

Points are weighted by the inverse binomial variance of a mean of right-or-wrong scores, R (1 - R), taken from a
first fit without weights. Cells of one allocation, which differ in the seed, share one curve.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from analysis.fitting.logistic import Array, Limits, Logistics, fit_logistics, logistic, on_bounds
from analysis.fitting.observations import MIN_POINTS, Allocation, BasePoint, Observations
from analysis.fitting.records import IsotonicCurve, isotonic_curve, record_breaking
from analysis.fitting.resampling import Resampling
from analysis.fitting.threads import in_threads
from analysis.options import FitOptions

STEEPNESS = (0.1, 10.0)
"""Bounds on s."""
_LN10 = float(np.log(10.0))
_LEAST_VARIANCE = (
    0.02 * 0.98
)  # of one right-or-wrong score: keeps a score near 0 or 1 from taking all the weight
_STARTS = 3
_BATCH = 128  # cells fitted in one go
_BOUND_WORDS = {
    ("low", "lower"): "R0 at 0",
    ("low", "upper"): "R0 at 1",
    ("high", "upper"): "A at 1",
    ("gain", "lower"): "A at R0 (no gain)",
    ("middle", "lower"): "Cmid at its lower bound",
    ("middle", "upper"): "Cmid at its upper bound",
    ("slope", "lower"): f"s at {STEEPNESS[0]:g}",
    ("slope", "upper"): f"s at {STEEPNESS[1]:g}",
}


@dataclass(frozen=True)
class CurveFit:
    """A fitted curve and how far to trust it."""

    start: float
    """R0, reward at C = 0."""
    ceiling: float
    """A, reward as C grows without end; an extrapolation unless the curve levels inside the observed
    compute."""
    midpoint: float
    """Cmid, in the unit of the compute that was fitted."""
    steepness: float
    """s."""
    converged: bool
    on_bound: tuple[str, ...]
    """Parameters that rest on a bound of the fit, in words."""
    points: int
    """Evaluations with C > 0 that were used; the base model's is not counted."""
    rmse: float
    """Root mean square residual over the counted points, in reward."""
    compute_min: float
    compute_max: float

    def predict(self, compute: ArrayLike) -> Array:
        """Reward at each compute (same shape); defined for C >= 0, observed only in [compute_min,
        compute_max]."""
        with np.errstate(divide="ignore"):
            log_c = np.log10(np.asarray(compute, dtype=np.float64))
        unit = logistic(self.steepness * _LN10 * (log_c - np.log10(self.midpoint)))
        return self.start + (self.ceiling - self.start) * unit

    def observes(self, compute: ArrayLike) -> np.ndarray:
        """Whether each compute lies in the observed range (same shape)."""
        values = np.asarray(compute, dtype=np.float64)
        return (values >= self.compute_min) & (values <= self.compute_max)


@dataclass(frozen=True)
class AllocationCurve:
    """An allocation's curve from all its cells."""

    allocation: Allocation
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    fit: CurveFit
    by_records: CurveFit | None
    """The same curve fitted to record-breaking points only, as the paper does; None for too few of them."""
    isotonic: IsotonicCurve
    replicates: Logistics | None
    """Bootstrap replicates of the curve, in log10 compute; None without intervals."""

    def predict_replicates(self, compute: ArrayLike) -> Array:
        """(points, R) rewards of the replicates."""
        assert self.replicates is not None
        return self.replicates.predict(np.log10(np.asarray(compute, dtype=np.float64)))


def fit_curve(compute: ArrayLike, reward: ArrayLike, base_reward: float | None = None) -> CurveFit:
    """Fit the sigmoid to one learning curve.

    compute, reward: shape (points,), compute > 0, rewards in [0, 1], at least MIN_POINTS different computes.
    base_reward: the base model's reward, used as one more observation, at C = 0.
    Raises ValueError for too few points.
    """
    c, r = np.asarray(compute, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    if len(np.unique(c)) < MIN_POINTS:
        raise ValueError(f"{len(np.unique(c))} points; the curve needs at least {MIN_POINTS}")
    return _fit_points(c, r[:, None], base_reward)[0][0]


def fit_cells(groups: Sequence[Observations], base: BasePoint | None) -> dict[str, CurveFit]:
    """A curve for every cell by itself, without intervals. Cells evaluated at the same computes (the seeds of
    an allocation, or batches of one size) are fitted in one go."""
    by_marks: dict[bytes, list[Observations]] = {}
    for group in groups:
        for index in range(len(group.cells)):
            cell = group.of_cell(index)
            by_marks.setdefault(cell.compute.tobytes(), []).append(cell)

    def fit(cells: list[Observations]) -> list[tuple[str, CurveFit]]:
        rewards = np.stack([cell.reward for cell in cells], axis=1)
        fits, _ = _fit_points(cells[0].compute, rewards, base.reward if base else None)
        return [(cell.cells[0], fit) for cell, fit in zip(cells, fits, strict=True)]

    chunks = [cells[i : i + _BATCH] for cells in by_marks.values() for i in range(0, len(cells), _BATCH)]
    return dict(pair for pairs in in_threads(fit, chunks) for pair in pairs)


def fit_allocations(
    groups: Sequence[Observations], base: BasePoint | None, options: FitOptions, resampling: Resampling
) -> list[AllocationCurve]:
    """A curve for every allocation, in the given order, with replicates of what the resampling draws anew."""
    return list(in_threads(lambda group: _fit_allocation(group, base, options, resampling), groups))


def _fit_allocation(
    group: Observations, base: BasePoint | None, options: FitOptions, resampling: Resampling
) -> AllocationCurve:
    base_reward = base.reward if base else None
    marks, mark = np.unique(group.compute, return_inverse=True)
    x = np.log10(marks)
    counts = np.bincount(mark)[:, None].astype(np.float64)
    reward = _means(group.reward[:, None], mark)
    (fit,), weights = _fit_points(marks, reward, base_reward, counts)
    residual = group.reward - fit.predict(group.compute)  # of every evaluation, not of the means over seeds
    fit = replace(fit, points=len(group.reward), rmse=float(np.sqrt(np.mean(residual**2))))
    return AllocationCurve(
        allocation=group.allocation,
        cells=group.cells,
        seeds=group.seeds,
        fit=fit,
        by_records=_fit_records(marks, reward[:, 0], base_reward, options),
        isotonic=isotonic_curve(x, reward[:, 0], weights[: len(x), 0]),
        replicates=_fit_replicates(group, base, residual, weights, resampling) if resampling.over else None,
    )


def _fit_replicates(
    group: Observations, base: BasePoint | None, residual: Array, weights: Array, resampling: Resampling
) -> Logistics:
    """The curve again for each bootstrap draw, with the weights of the points held fixed."""
    marks, mark = np.unique(group.compute, return_inverse=True)
    x, replicates = np.log10(marks), resampling.replicates
    # What all seeds of a mark share is no spread between seeds but lack of fit; at a mark of one seed they cannot be told apart.
    shared = _means(residual[:, None], mark)[mark, 0]
    deviations = residual - np.where(np.bincount(mark)[mark] > 1, shared, 0.0)
    drawn = resampling.drawn_rewards(group) + resampling.drawn_seeds(group, deviations)
    reward = np.broadcast_to(_means(drawn, mark), (len(x), replicates))
    if base is not None:
        x = np.append(x, -np.inf)
        reward = np.vstack([reward, np.broadcast_to(resampling.drawn_base(base), (1, replicates))])
    return fit_logistics(x, np.ascontiguousarray(reward), weights, _limits(x))


def _means(values: Array, mark: np.ndarray) -> Array:
    """(marks, R) means of (N, R) values over the evaluations at one compute; mark: (N,) which compute each is at."""
    order = np.argsort(mark, kind="stable")
    counts = np.bincount(mark)[:, None]
    firsts = np.r_[0, np.cumsum(counts)[:-1]]
    return np.add.reduceat(values[order], firsts, axis=0) / counts


def _fit_records(
    compute: Array, reward: Array, base_reward: float | None, options: FitOptions
) -> CurveFit | None:
    records = record_breaking(reward, options.record_bin, options.record_smoothing)
    if len(records) < MIN_POINTS:
        return None
    fit = _fit_points(compute[records], reward[records, None], base_reward)[0][0]
    # Also where no record was broken the reward was observed.
    return replace(fit, compute_min=float(compute.min()), compute_max=float(compute.max()))


def _fit_points(
    compute: Array, reward: Array, base_reward: float | None, counts: Array | None = None
) -> tuple[list[CurveFit], Array]:
    """Fit each column of reward (N, B) at compute (N,); also the weights (N [+ 1 for the base], B).

    counts: (N, 1) evaluations behind each point, 1 when not given.
    """
    points, columns = reward.shape
    x = np.log10(compute)
    counts = np.ones((points, 1)) if counts is None else counts
    xs = x
    if base_reward is not None:
        # The base model is one more observation, at log C = -inf, where the logistic is 0.
        xs = np.append(x, -np.inf)
        reward = np.vstack([reward, np.full(columns, base_reward)])
        counts = np.vstack([counts, [[1.0]]])
    limits = _limits(x)
    first = fit_logistics(xs, reward, counts, limits)
    fitted = first.predict(xs)
    weights = counts / np.maximum(fitted * (1.0 - fitted), _LEAST_VARIANCE)
    weights = weights / weights.mean(axis=0)
    fit = fit_logistics(xs, reward, weights, limits, starts=_STARTS)
    bounds = on_bounds(fit, limits)
    rmse = np.sqrt(np.mean((fit.predict(x) - reward[:points]) ** 2, axis=0))
    fits = [
        CurveFit(
            start=float(fit.low[i]),
            ceiling=float(fit.high[i]),
            midpoint=float(10.0 ** fit.middle[i]),
            steepness=float(fit.slope[i] / _LN10),
            converged=bool(fit.converged[i]),
            on_bound=_bound_words(bounds[i]),
            points=points,
            rmse=float(rmse[i]),
            compute_min=float(compute.min()),
            compute_max=float(compute.max()),
        )
        for i in range(columns)
    ]
    return fits, weights


def _bound_words(bounds: dict[str, str]) -> tuple[str, ...]:
    """Where there is no gain, any midpoint and steepness fit equally well, and their bounds mean nothing."""
    relevant = {"low", "high", "gain"} if "gain" in bounds else set(bounds)
    items = ((name, side) for name, side in bounds.items() if name in relevant)
    return tuple(_BOUND_WORDS[item] for item in items if item in _BOUND_WORDS)


def _limits(x: Array) -> Limits:
    finite = x[np.isfinite(x)]
    return Limits(
        floor=0.0,
        cap=1.0,
        middle=(float(finite.min()) - 2.0, float(finite.max()) + 1.0),
        slope=(STEEPNESS[0] * _LN10, STEEPNESS[1] * _LN10),
    )

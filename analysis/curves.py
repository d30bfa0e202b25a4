"""One bounded monotone sigmoid of reward in compute per cell.

    R(C) = R0 + (A - R0) / (1 + (Cmid / C)^s),   0 <= R0 < A <= 1, s > 0

R0 is the reward at C = 0, A the ceiling, Cmid the compute at half the gain and s the steepness. It is a
logistic curve in log C, so it is monotone by construction: a curve that falls is fitted by (nearly) a level
line, and its RMSE tells.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from analysis.logistic import logistic, starting_points

MIN_POINTS = 4
"""Fewest points with C > 0 for a fit: the curve has four parameters."""

_SMALLEST_GAIN = 1e-6  # keeps R0 < A strictly
_STEEPNESS_BOUNDS = (0.1, 10.0)
_STARTING_STEEPNESS = (0.4, 0.8, 1.5, 3.0)
_LN10 = float(np.log(10.0))
_BOUND_TOLERANCE = 1e-3  # share of a parameter's allowed width that counts as resting on the bound


@dataclass(frozen=True)
class CurveFit:
    """A fitted curve and how far to trust it."""

    start: float
    """R0, reward at C = 0."""
    ceiling: float
    """A, reward as C grows without end; an extrapolation unless the curve levels inside the observed
    compute."""
    midpoint: float
    """Cmid, in the units of the compute that was fitted."""
    steepness: float
    """s."""
    converged: bool
    on_bound: tuple[str, ...]
    """Parameters that rest on a bound of the fit, in words."""
    points: int
    """Points with C > 0 that were used; the base model's point is not counted."""
    rmse: float
    """Root mean square residual over the counted points, in reward."""
    compute_min: float
    compute_max: float

    def predict(self, compute: ArrayLike) -> NDArray[np.float64]:
        """Reward at each compute (same shape); defined for C >= 0, observed only in [compute_min,
        compute_max]."""
        with np.errstate(divide="ignore"):
            log_c = np.log10(np.asarray(compute, dtype=np.float64))
        unit = logistic(self.steepness * _LN10 * (log_c - np.log10(self.midpoint)))
        return self.start + (self.ceiling - self.start) * unit


@dataclass(frozen=True)
class CellCurve:
    """A cell and its fitted curve."""

    cell: str
    problems_per_batch: int
    rollouts_per_problem: int
    seed: int
    fit: CurveFit

    @property
    def batch_rollouts(self) -> int:
        """B = B_p * n."""
        return self.problems_per_batch * self.rollouts_per_problem


def fit_curve(compute: ArrayLike, reward: ArrayLike, base_reward: float | None = None) -> CurveFit:
    """Fit the sigmoid by least squares, from several fixed starts, and keep the best.

    compute, reward: shape (points,), compute > 0, rewards in [0, 1], at least MIN_POINTS of them.
    base_reward: the base model's reward, used as one more observation, at C = 0.
    Raises ValueError for too few points.
    """
    c = np.asarray(compute, dtype=np.float64)
    r = np.asarray(reward, dtype=np.float64)
    if len(c) < MIN_POINTS:
        raise ValueError(f"{len(c)} points; the curve needs at least {MIN_POINTS}")
    log_c = np.log10(c)
    # The gain as a share of what is left above R0 turns R0 < A <= 1 into plain bounds on each parameter.
    lower = np.array([0.0, _SMALLEST_GAIN, log_c.min() - 2.0, _STEEPNESS_BOUNDS[0]])
    upper = np.array([1.0 - 1e-6, 1.0, log_c.max() + 1.0, _STEEPNESS_BOUNDS[1]])

    # The base model is one more observation, at log C = -inf, where the logistic is 0.
    x = log_c if base_reward is None else np.append(log_c, -np.inf)
    y = r if base_reward is None else np.append(r, base_reward)

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        start, gain, mid, steepness = theta
        return start + gain * (1.0 - start) * logistic(steepness * _LN10 * (x - mid)) - y

    fits = []
    for first, rise, mid, slope in starting_points(x, y, [_LN10 * s for s in _STARTING_STEEPNESS]):
        theta = [first, rise / max(1.0 - first, _SMALLEST_GAIN), mid, slope / _LN10]
        begin = np.clip(theta, lower + 1e-4, upper - 1e-4)
        fits.append(least_squares(residuals, begin, bounds=(lower, upper), xtol=1e-10, ftol=1e-10))
    best = min(fits, key=lambda fit: fit.cost)
    start, gain, mid, steepness = (float(value) for value in best.x)
    return CurveFit(
        start=start,
        ceiling=start + gain * (1.0 - start),
        midpoint=10.0**mid,
        steepness=steepness,
        converged=bool(best.success),
        on_bound=_on_bound(best.x, lower, upper),
        points=len(c),
        rmse=float(np.sqrt(np.mean(best.fun[: len(c)] ** 2))),
        compute_min=float(c.min()),
        compute_max=float(c.max()),
    )


def fit_cells(
    history: pd.DataFrame, metric: str, base_reward: float | None = None
) -> tuple[list[CellCurve], dict[str, str]]:
    """Fit every cell of a history table.

    Returns the fitted cells, ordered by n, B_p and seed, and for each other cell of the table the reason why
    it was not fitted. Rows whose metric is missing or not finite are not used.
    """
    curves: list[CellCurve] = []
    unfitted: dict[str, str] = {}
    for cell, rows in history.groupby("cell", sort=True):
        used = usable_rows(rows, metric)
        if len(used) < MIN_POINTS:
            unfitted[str(cell)] = (
                f"{len(used)} usable points of {metric}; a curve needs at least {MIN_POINTS}"
            )
            continue
        first = used.iloc[0]
        curves.append(
            CellCurve(
                cell=str(cell),
                problems_per_batch=int(first["problems_per_batch"]),
                rollouts_per_problem=int(first["rollouts_per_problem"]),
                seed=int(first["seed"]),
                fit=fit_curve(used["compute_rollouts"], used[metric], base_reward),
            )
        )
    curves.sort(
        key=lambda curve: (curve.rollouts_per_problem, curve.problems_per_batch, curve.seed, curve.cell)
    )
    return curves, unfitted


def usable_rows(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with C > 0 and a finite metric."""
    values = pd.to_numeric(rows[metric], errors="coerce")
    return rows[np.isfinite(values) & (rows["compute_rollouts"] > 0)]


def _on_bound(
    theta: NDArray[np.float64], lower: NDArray[np.float64], upper: NDArray[np.float64]
) -> tuple[str, ...]:
    below = ("R0 at 0", "A at R0 (no gain)", "Cmid at its lower bound", f"s at {_STEEPNESS_BOUNDS[0]:g}")
    above = ("R0 at 1", "A at 1", "Cmid at its upper bound", f"s at {_STEEPNESS_BOUNDS[1]:g}")
    margin = _BOUND_TOLERANCE * (upper - lower)
    words = []
    for index in range(len(theta)):
        if theta[index] - lower[index] <= margin[index]:
            words.append(below[index])
        elif upper[index] - theta[index] <= margin[index]:
            words.append(above[index])
    return tuple(words)

"""The fits of the analysis, one at a time by ``scipy.optimize.curve_fit``: what a careful script would do."""

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeWarning, curve_fit

from analysis.fitting.logistic import Limits

Array = NDArray[np.float64]

MOST_EVALUATIONS = 2000
"""Of the model in one fit."""


def fit_bounded(x: Array, y: Array, weights: Array, limits: Limits) -> float:
    """Fit ``low + (high - low) / (1 + exp(-slope (x - middle)))`` inside the analysis' bounds; ``curve_fit`` takes the
    trust-region reflective method then.

    x, y, weights: shape (N,); x may hold -inf, where the logistic is 0. Returns the weighted sum of squared
    residuals, infinite where the fit failed.
    """
    lower = np.array([limits.floor, limits.floor, limits.middle[0], limits.slope[0]])
    upper = np.array([limits.cap, limits.cap, limits.middle[1], limits.slope[1]])
    start = np.clip(_start(x, y), lower + 1e-6, upper - 1e-6)
    return _fit(x, y, weights, start, bounds=(lower, upper), max_nfev=MOST_EVALUATIONS)


def fit_unbounded(x: Array, y: Array, weights: Array) -> float:
    """The same without bounds, from the same start, by MINPACK's Levenberg-Marquardt: the fastest that ``curve_fit``
    has, but the result may lie where the parameters mean nothing."""
    return _fit(x, y, weights, _start(x, y), maxfev=MOST_EVALUATIONS)


def _logistic(x: Array, low: float, high: float, middle: float, slope: float) -> Array:
    return low + (high - low) / (1.0 + np.exp(-slope * (x - middle)))


def _start(x: Array, y: Array) -> Array:
    """The lowest and the highest value, the first x at half the rise, and a slope that spans half the points."""
    inside = np.isfinite(x)
    low, high = y.min(), y.max()
    middle = x[inside][y[inside] >= (low + high) / 2.0].min(initial=x[inside].max())
    return np.array([low, high, middle, 8.0 / max(float(np.ptp(x[inside])), 1e-3)])


def _fit(x: Array, y: Array, weights: Array, start: Array, **options: Any) -> float:
    sigma = 1.0 / np.sqrt(weights)
    with warnings.catch_warnings(), np.errstate(over="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)  # of the covariance, which is not used
        try:
            theta, _ = curve_fit(_logistic, x, y, start, sigma, check_finite=False, **options)
        except RuntimeError:  # the documented way in which curve_fit says that it did not converge
            return math.inf
        return float((weights * (_logistic(x, *theta) - y) ** 2).sum())

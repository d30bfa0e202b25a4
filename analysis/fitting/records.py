"""Two other views of a noisy learning curve: record-breaking points, and isotonic regression."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from analysis.fitting.logistic import Array


def record_breaking(reward: ArrayLike, bin_width: float = 0.01, smoothing: float = 0.0) -> NDArray[np.intp]:
    """Indices of the points at which the reward enters a higher bin than ever before, the first point included.

    reward: (N,) in order of compute. smoothing: weight of the past in an exponential moving average taken
    first (from the first point on, without bias correction). The protocol of "IsoCompute Playbook" (draft: bins of
    0.01, an average of 0.8). A running maximum of noisy scores is biased upwards.
    """
    values = np.asarray(reward, dtype=np.float64)
    if not len(values):
        return np.empty(0, dtype=np.intp)
    smooth = np.empty_like(values)
    smooth[0] = values[0]
    for index in range(1, len(values)):
        smooth[index] = smoothing * smooth[index - 1] + (1.0 - smoothing) * values[index]
    # A score such as 0.29 must fall in its own bin although 0.29 / 0.01 is just below 29.
    bins = np.floor(smooth / bin_width + 1e-9)
    best_before = np.r_[-np.inf, np.maximum.accumulate(bins)[:-1]]
    return np.flatnonzero(bins > best_before)


@dataclass(frozen=True)
class IsotonicCurve:
    """The best non-decreasing curve, without parameters: constant between the points' log compute it joins."""

    log10_compute: Array
    """(N,) ascending."""
    reward: Array
    """(N,) non-decreasing."""

    def predict(self, compute: ArrayLike) -> Array:
        """Reward at each compute, linear in log C between points; level outside them."""
        return np.interp(np.log10(np.asarray(compute, dtype=np.float64)), self.log10_compute, self.reward)


def isotonic_curve(log10_compute: Array, reward: Array, weights: Array) -> IsotonicCurve:
    """Isotonic regression (pool adjacent violators) of (N,) points in ascending order of compute."""
    return IsotonicCurve(log10_compute, isotonic_regression(reward, weights=weights).x)

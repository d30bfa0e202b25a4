"""Percentile intervals."""

import numpy as np
from numpy.typing import NDArray

from analysis.fitting.logistic import Array

Interval = tuple[float, float]
"""(low, high) at the level of the fit."""


def interval(replicates: Array, confidence: float) -> Interval:
    """The percentile interval of (R,) replicates."""
    tail = (1.0 - confidence) / 2.0
    return pair(np.quantile(replicates, (tail, 1.0 - tail)))


def pair(values: NDArray[np.floating]) -> Interval:
    """(low, high) from an array of two."""
    return float(values[0]), float(values[1])

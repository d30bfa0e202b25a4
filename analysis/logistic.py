"""Least squares with the logistic, which the reward curves and the allocation law share.

y = offset + rise / (1 + exp(-slope (x - middle)))
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def logistic(z: ArrayLike) -> NDArray[np.float64]:
    """1 / (1 + exp(-z)), same shape; z may be infinite."""
    return 1.0 / (1.0 + np.exp(-np.clip(z, -500.0, 500.0)))


def starting_points(
    x: NDArray[np.float64], y: NDArray[np.float64], slopes: Sequence[float]
) -> list[tuple[float, float, float, float]]:
    """Where to start a fit: for each slope the best (offset, rise, middle, slope) over a mesh of middles.

    x, y: shape (points,); x may hold -inf, where y is the offset. Given slope and middle, y is linear in
    offset and rise, so these are solved for, without bounds.
    """
    finite = x[np.isfinite(x)]
    middles = np.linspace(finite.min(), finite.max(), 41)
    found = []
    for slope in slopes:
        unit = logistic(slope * (x[None, :] - middles[:, None]))  # (middles, points)
        centred = unit - unit.mean(axis=1, keepdims=True)
        rise = (centred @ (y - y.mean())) / np.maximum((centred**2).sum(axis=1), 1e-12)
        offset = y.mean() - rise * unit.mean(axis=1)
        squared = ((rise[:, None] * unit + offset[:, None] - y) ** 2).sum(axis=1)
        best = int(squared.argmin())
        found.append((float(offset[best]), float(rise[best]), float(middles[best]), slope))
    return found

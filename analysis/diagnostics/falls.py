"""Has a noisy series fallen from its best? The statistics behind ``overfitting``.

The best of many noisy rows lies above the truth, so "below the best row" is what a flat curve looks like too.
Instead the mean of the last w rows is compared with the mean of every earlier window of w rows, for w = 1, 2,
4, ..., and the largest of the standardised differences is judged against the distribution of that largest
difference under noise alone. This keeps false alarms at the stated level, whatever the number of rows, and
finds a short sharp fall as well as a long slow one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

Floats = NDArray[np.float64]

_MAX_BLOCKS = 32
"""Longer series are judged in so many blocks of adjacent rows."""

_DRAWS = 1999
_SEED = 0


@dataclass(frozen=True)
class Noise:
    """The rows' noise as a factor F, shape (r, T): their covariance is F'F."""

    factor: Floats
    freedom: float
    per_problem: bool


def paired_noise(scores: Floats) -> Noise:
    """From the scores of each problem (P) in each row (T), shape (P, T)."""
    count = len(scores)
    factor = (scores - scores.mean(axis=0)) / np.sqrt(count * (count - 1.0))
    return Noise(factor, count - 1.0, per_problem=True)


def binomial_noise(rewards: Floats, trials: Floats | float) -> Noise:
    """From rewards as shares of independent trials, in rows independent of each other."""
    # One right and one wrong more, so that a share of 0 or 1 is not taken for exact.
    share = (np.clip(rewards, 0.0, 1.0) * trials + 1.0) / (trials + 2.0)
    return Noise(np.diag(np.sqrt(share * (1.0 - share) / trials)), np.inf, per_problem=False)


@dataclass(frozen=True)
class Fall:
    """The most significant difference between an earlier window and the last of the same width."""

    p: float
    """Chance of so significant a difference under noise alone, over all windows."""
    drop: float
    """The earlier window's mean minus the last window's."""
    drop_se: float
    """Its standard error, for windows named in advance."""
    drop_at_least: float
    """Lower bound of the fall at confidence 1 - level, over all windows."""
    weights: Floats
    """Over the rows, shape (T,): the best window's mean minus the last window's."""


def largest_fall(means: Floats, noise: Noise, level: float) -> Fall | None:
    """Compare every earlier window of the rows' means, shape (T,), with the last window.

    The null distribution is Gaussian (multivariate t for paired noise), drawn with a fixed seed, for a flat
    truth; a truth that rises gives fewer false alarms. None when no difference has any noise (all rows are
    equal, problem by problem).
    """
    blocks, contrasts = _windows(len(means))
    # QR keeps the covariance of the blocks in a small square factor.
    factor = np.linalg.qr(noise.factor @ blocks.T, mode="r") @ contrasts.T
    errors = np.linalg.norm(factor, axis=0)
    noisy = errors > 1e-12
    if not noisy.any():
        return None
    factor, errors, weights = factor[:, noisy], errors[noisy], (contrasts @ blocks)[noisy]
    drops = weights @ means
    normals, chi2 = _draws(len(factor), noise.freedom)
    largest_by_chance = (normals @ (factor / errors)).max(axis=1) / chi2
    worst = int(np.argmax(drops / errors))
    exceeded = int((largest_by_chance >= drops[worst] / errors[worst]).sum())
    return Fall(
        p=(1.0 + exceeded) / (1.0 + len(largest_by_chance)),
        drop=float(drops[worst]),
        drop_se=float(errors[worst]),
        drop_at_least=float((drops - np.quantile(largest_by_chance, 1.0 - level) * errors).max()),
        weights=weights[worst],
    )


@lru_cache(maxsize=256)
def _windows(rows: int) -> tuple[Floats, Floats]:
    """Block means over rows, shape (T', T), and differences of windows over blocks, shape (W, T')."""
    parts = np.array_split(np.arange(rows), min(rows, _MAX_BLOCKS))
    blocks = np.zeros((len(parts), rows))
    for block, part in enumerate(parts):
        blocks[block, part] = 1.0 / len(part)
    return blocks, np.array(list(_differences(len(parts))))


def _differences(count: int) -> Iterator[Floats]:
    width = 1
    while 2 * width <= count:
        for start in range(count - 2 * width + 1):
            weights = np.zeros(count)
            weights[start : start + width] = 1.0 / width
            weights[count - width :] = -1.0 / width
            yield weights
        width *= 2


@lru_cache(maxsize=256)
def _draws(dimensions: int, freedom: float) -> tuple[Floats, Floats]:
    """Standard normals, shape (draws, dimensions), and the divisors that make them a multivariate t."""
    rng = np.random.default_rng(_SEED)
    normals = rng.standard_normal((_DRAWS, dimensions))
    if np.isinf(freedom):
        return normals, np.ones(_DRAWS)
    return normals, np.sqrt(rng.chisquare(freedom, _DRAWS) / freedom)


def start_of_fall(means: Floats) -> int:
    """The last row before the fall, for a series that has fallen.

    It is the last row of the rise in the least-squares curve that never falls up to that row and then either
    goes down a straight line in the row's number or drops to a lower constant. (The mode of unimodal regression
    would be the highest noisy row of a plateau.) Ties go to the earlier row.
    """
    errors = []
    for last in range(len(means) - 1):
        rise = isotonic_regression(means[: last + 1]).x
        after = means[last + 1 :] - rise[-1]
        x = np.arange(1.0, len(after) + 1.0)
        line = min(0.0, float(x @ after / (x @ x))) * x
        step = min(0.0, float(after.mean()))
        fall = min(np.sum((after - line) ** 2), np.sum((after - step) ** 2))
        errors.append(np.sum((means[: last + 1] - rise) ** 2) + fall)
    return int(np.argmin(errors))

"""How much the best reward depends on n and on B_p, and which n is best at each B_p.

Everything works on arrays over allocations: ``problems_per_batch`` and ``rollouts_per_problem`` of shape (A,),
one entry for each allocation (B_p, n), and ``reward`` of shape (A, R), one column for the estimate or for each
bootstrap replicate. The reward of an allocation is whatever the caller compares: the best of its curve, or its
curve at one compute. NaN means that the allocation has no reward.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad
from scipy.stats import norm

POINT = 0.01
"""One point of reward, the unit of every sensitivity."""


@dataclass(frozen=True)
class Sensitivity:
    """Sensitivities in points (0.01 of reward), each of shape (R,); NaN where fewer than two values of the
    varied quantity can be compared."""

    within_n: NDArray[np.float64]
    """Range (largest minus smallest reward) over n at equal B_p, averaged over the B_p that have two or more
    n."""
    within_problems: NDArray[np.float64]
    """Range over B_p at equal n, averaged over the n that have two or more B_p."""
    best_n: NDArray[np.float64]
    """Range over n of the largest reward over B_p."""
    best_problems: NDArray[np.float64]
    """Range over B_p of the largest reward over n."""


def sensitivity(
    problems_per_batch: ArrayLike, rollouts_per_problem: ArrayLike, reward: NDArray[np.float64]
) -> Sensitivity:
    """How much the reward changes with n and with B_p, in two definitions.

    ``best_*`` asks what a wrong choice of one quantity costs when the other is chosen well. It is the reading
    under which the paper's "B_p 1.9 points against n 9.2" makes sense, but the paper does not define its
    figure. In a ragged grid (B_p n <= B_max) it mixes the two: the largest n exist at the smallest B_p
    only, so what they lose may be the fault of B_p. ``within_*`` compares allocations only where the other
    quantity is equal, and uses every allocation that has a partner; prefer it for ragged grids.

    A range is never negative, so noise alone gives a positive value: see ``range_of_noise``. Bootstrap
    replicates carry that bias twice.

    Raises ValueError when an allocation occurs twice (average its seeds first).
    """
    cube = _cube(problems_per_batch, rollouts_per_problem, reward)
    return Sensitivity(
        within_n=_mean(_range(cube, axis=1), axis=0) / POINT,
        within_problems=_mean(_range(cube, axis=0), axis=0) / POINT,
        best_n=_range(np.fmax.reduce(cube, axis=0), axis=0) / POINT,
        best_problems=_range(np.fmax.reduce(cube, axis=1), axis=0) / POINT,
    )


def range_of_noise(values: int, standard_error: float) -> float:
    """The range in points to be expected among equal rewards, each measured with this standard error.

    It is ``standard_error`` times the mean range of ``values`` independent standard normals (the control
    chart constant d2: 1.128 for 2, 2.326 for 5). A sensitivity near it is no evidence of any effect.
    """
    if values < 2:
        return 0.0
    mean_range, _error = quad(lambda x: 1.0 - norm.cdf(x) ** values - norm.sf(x) ** values, -10.0, 10.0)
    return float(mean_range) * standard_error / POINT


def best_n(
    problems_per_batch: ArrayLike, rollouts_per_problem: ArrayLike, reward: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The n with the largest reward at each B_p, for each column.

    Returns the values of B_p in order, shape (Q,), and the best n, shape (Q, R); NaN where no n has a reward.
    Equal rewards go to the smaller n.
    """
    cube = _cube(problems_per_batch, rollouts_per_problem, reward)
    levels = np.unique(np.asarray(rollouts_per_problem, dtype=np.int64))
    # argmax takes the first of equals, and n is in ascending order.
    found = levels[np.argmax(np.where(np.isnan(cube), -np.inf, cube), axis=1)].astype(float)
    found[np.isnan(cube).all(axis=1)] = np.nan
    return np.unique(np.asarray(problems_per_batch, dtype=np.int64)), found


def best_n_by_metric(
    problems_per_batch: ArrayLike,
    rollouts_per_problem: ArrayLike,
    rewards: Mapping[str, NDArray[np.float64]],
    level: float = 0.9,
) -> pd.DataFrame:
    """The best n at each B_p for each metric, as the paper tabulates it for best@4 and worst@4.

    ``rewards`` maps a metric to its rewards, shape (A, R): column 0 is the estimate, the other columns are
    bootstrap replicates (none for R = 1).

    Returns one row per metric and B_p that has a reward, columns: metric, problems_per_batch, best_n,
    smallest_n and largest_n (the range of n with a reward at this B_p), on_edge (best_n is one of these two
    and they differ: the optimum may lie outside the grid), n_low and n_high (the central ``level`` of the
    replicates, values of n that occurred) and agreement (share of replicates with this best n); the last
    three are NaN without replicates.
    """
    problems = np.asarray(problems_per_batch, dtype=np.int64)
    rollouts = np.asarray(rollouts_per_problem, dtype=np.int64)
    columns = ["metric", "problems_per_batch", "best_n", "smallest_n", "largest_n", "on_edge"]
    columns += ["n_low", "n_high", "agreement"]
    rows = []
    for metric, reward in rewards.items():
        levels, best = best_n(problems, rollouts, reward)
        for bp, found in zip(levels, best, strict=True):
            if np.isnan(found[0]):
                continue
            tried = rollouts[(problems == bp) & ~np.isnan(reward[:, 0])]
            replicates = found[1:][~np.isnan(found[1:])]
            low, high, agreement = np.nan, np.nan, np.nan
            if len(replicates):
                tails = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
                low, high = np.quantile(replicates, tails, method="inverted_cdf")
                agreement = float(np.mean(replicates == found[0]))
            edge = len(tried) > 1 and found[0] in (tried.min(), tried.max())
            rows.append(
                (
                    metric,
                    int(bp),
                    int(found[0]),
                    int(tried.min()),
                    int(tried.max()),
                    edge,
                    low,
                    high,
                    agreement,
                )
            )
    return pd.DataFrame(rows, columns=columns)


def _cube(
    problems_per_batch: ArrayLike, rollouts_per_problem: ArrayLike, reward: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rewards by B_p, n and column, shape (values of B_p, values of n, R); NaN where the grid has no such
    allocation."""
    problems, row = np.unique(np.asarray(problems_per_batch, dtype=np.int64), return_inverse=True)
    rollouts, column = np.unique(np.asarray(rollouts_per_problem, dtype=np.int64), return_inverse=True)
    if len(np.unique(row * len(rollouts) + column)) < len(row):
        raise ValueError("an allocation (B_p, n) occurs twice; average its seeds first")
    cube = np.full((len(problems), len(rollouts), reward.shape[1]), np.nan)
    cube[row, column] = reward
    return cube


def _range(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Largest minus smallest along an axis, NaN left out; NaN where fewer than two values are there."""
    spread = np.fmax.reduce(values, axis=axis) - np.fmin.reduce(values, axis=axis)
    return np.where((~np.isnan(values)).sum(axis=axis) >= 2, spread, np.nan)


def _mean(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Mean along an axis, NaN left out; NaN where nothing is left."""
    there = (~np.isnan(values)).sum(axis=axis)
    total = np.nansum(values, axis=axis)
    return np.divide(total, there, out=np.full(total.shape, np.nan), where=there > 0)

"""Rewards of all allocations over a grid of computes, and the best of each n."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.fitting.curves import AllocationCurve
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation

GRID_POINTS = 120
"""Compute values at which the envelope is taken, evenly spaced in log C."""

END_SHARE = 0.8
"""Share of the furthest compute from which on an allocation counts as having run to the end, in tokens and seconds."""


@dataclass(frozen=True)
class Landscape:
    """Rewards of A allocations at G computes."""

    curves: tuple[AllocationCurve, ...]
    compute: Array
    """(G,) ascending."""
    reward: Array
    """(A, G)"""
    observed: NDArray[np.bool_]
    """(A, G) whether the allocation was observed there."""
    replicates: Array | None
    """(A, G, R) the same rewards in each bootstrap replicate."""

    @property
    def allocations(self) -> list[Allocation]:
        """Of each row."""
        return [curve.allocation for curve in self.curves]

    def only(self, rows: Sequence[int]) -> "Landscape":
        """Some of the allocations, at the same computes."""
        index = np.asarray(rows, dtype=np.intp)
        return Landscape(
            tuple(self.curves[i] for i in index),
            self.compute,
            self.reward[index],
            self.observed[index],
            None if self.replicates is None else self.replicates[index],
        )


def compute_grid(
    curves: Sequence[AllocationCurve], in_rollouts: bool = True, points: int = GRID_POINTS
) -> Array:
    """Compute values, evenly spaced in log C, shape (points,); empty without curves.

    They run from the smallest observed compute to the end: where the first of those allocations stops that ran to the end, so
    that the last stretch does not fall to one of them for want of rivals. A budget that is no multiple of a cell's batch is
    rounded, so in rollouts these stop within one batch of each other; in other units, where equal rollouts cost unequal
    amounts, all within END_SHARE of the furthest are meant.
    """
    if not curves:
        return np.empty(0)
    furthest = max(curves, key=lambda curve: curve.fit.compute_max)

    def ran_to_the_end(curve: AllocationCurve) -> bool:
        if not in_rollouts:
            return curve.fit.compute_max >= END_SHARE * furthest.fit.compute_max
        batch = max(curve.allocation.batch_rollouts, furthest.allocation.batch_rollouts)
        return curve is furthest or curve.fit.compute_max + batch > furthest.fit.compute_max

    ends = [curve.fit.compute_max for curve in curves if ran_to_the_end(curve)]
    first, last = min(curve.fit.compute_min for curve in curves), min(ends)
    # Clipped, because rounding must not push the ends out of the observed range.
    return np.clip(np.geomspace(first, last, points), first, last)


def landscape(curves: Sequence[AllocationCurve], compute: Array) -> Landscape:
    """The curves' rewards at each compute."""
    shape = (len(curves), len(compute))
    sampled = [curve.predict_replicates(compute) for curve in curves if curve.replicates is not None]
    return Landscape(
        curves=tuple(curves),
        compute=compute,
        reward=np.array([curve.fit.predict(compute) for curve in curves]).reshape(shape),
        observed=np.array([curve.fit.observes(compute) for curve in curves], dtype=bool).reshape(shape),
        replicates=np.stack(sampled) if sampled and len(sampled) == len(curves) else None,
    )


@dataclass(frozen=True)
class BestN:
    """The best reward of each n at each compute, and which n leads. Unobserved rewards are -inf."""

    values: tuple[int, ...]
    """The values of n, ascending."""
    reward: Array
    """(n, G)"""
    replicates: Array | None
    """(n, G, R)"""

    @property
    def observed(self) -> NDArray[np.bool_]:
        """(n, G)"""
        return np.isfinite(self.reward)

    @property
    def contested(self) -> NDArray[np.bool_]:
        """(G,) whether at least two values of n were observed."""
        return self.observed.sum(axis=0) > 1

    @property
    def log2_n_star(self) -> Array:
        """(G,) of the point estimate; equal rewards go to the smaller n."""
        return np.log2(np.array(self.values))[self.reward.argmax(axis=0)]

    @property
    def log2_n_star_replicates(self) -> Array | None:
        """(G, R)"""
        if self.replicates is None:
            return None
        return np.log2(np.array(self.values))[self.replicates.argmax(axis=0)]


def best_by_n(land: Landscape) -> BestN:
    """For each n the best over B_p of the rewards observed at each compute; no n at all without a curve."""
    if not land.curves:
        return BestN((), np.empty((0, len(land.compute))), None)
    n = np.array([allocation.rollouts_per_problem for allocation in land.allocations])
    values = np.unique(n)
    seen = np.where(land.observed, land.reward, -np.inf)
    reward = np.stack([seen[n == value].max(axis=0) for value in values])
    replicates = None
    if land.replicates is not None:
        replicates = np.stack(
            [
                best_of_replicates(land.reward[n == v], land.replicates[n == v], land.observed[n == v])
                for v in values
            ]
        )
    return BestN(tuple(int(value) for value in values), reward, replicates)


def best_of_replicates(reward: Array, replicates: Array, observed: NDArray[np.bool_]) -> Array:
    """(G, R) best over the allocations of one n, from (A, G), (A, G, R) and (A, G).

    The estimates differ between values of B_p also by noise. Noise drawn on top of that would make the best of nearly equal
    curves vary as one curve does, where the best of several varies less. So the share of the spread over B_p that noise
    explains is taken out before (shrinkage towards their mean, as James and Stein do). The result is centred on the
    best estimate.
    """
    noise = replicates - reward[:, :, None]
    several = observed.sum(axis=0) > 1
    centre = reward
    if several.any():
        seen = np.where(observed, reward, np.nan)[:, several]
        drawn = np.where(observed[:, :, None], noise, np.nan)[:, several]
        spread = float(np.nanvar(seen, axis=0, ddof=1).sum())
        by_noise = float(np.nanvar(drawn, axis=0, ddof=1).mean(axis=-1).sum())
        kept = max(0.0, 1.0 - by_noise / spread) if spread > 0.0 else 1.0
        mean = np.nanmean(seen, axis=0)
        centre = reward.copy()
        centre[:, several] = mean + kept * (reward[:, several] - mean)
    best = np.where(observed[:, :, None], centre[:, :, None] + noise, -np.inf).max(axis=0)
    if several.any():
        estimate = np.where(observed, reward, -np.inf).max(axis=0)
        best[several] += (estimate[several] - best[several].mean(axis=-1))[:, None]
    return best


def table_budgets(grid: Array) -> Array:
    """Budgets for a short table: the powers of two inside the grid's range and its end; empty for an empty
    grid."""
    if len(grid) == 0:
        return np.empty(0)
    powers = 2.0 ** np.arange(np.ceil(np.log2(grid[0])), np.floor(np.log2(grid[-1])) + 1)
    return np.unique(np.append(powers, grid[-1]))

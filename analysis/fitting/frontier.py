"""The compute-optimal frontier: the upper envelope of the allocations' curves, inside observed compute only.

At each C only the allocations whose observed range contains C are compared, so nothing is extrapolated. What
wins there gives n*(C) and B_p*(C).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq

from analysis.fitting.curves import AllocationCurve
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation

GRID_POINTS = 120
"""Compute values at which the envelope is taken, evenly spaced in log C."""

Interval = tuple[float, float]
"""(low, high) at the level of the fit."""


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


@dataclass(frozen=True)
class FrontierPoint:
    """The best allocation at one compute."""

    compute: float
    """In the unit of the fit."""
    reward: float
    """The winning curve's reward."""
    reward_interval: Interval | None
    rollouts_per_problem: int
    """n*(C)."""
    rollouts_per_problem_interval: Interval | None
    problems_per_batch: int
    """B_p*(C)."""
    compared_n: tuple[int, ...]
    """The values of n observed at this compute, in order. With one alone, n* says nothing."""
    not_worse_n: tuple[int, ...] | None
    """The values of n that cannot be told from n*: the interval of their reward's difference to n*'s reaches 0."""

    @property
    def is_contested(self) -> bool:
        """Whether at least two values of n were observed here."""
        return len(self.compared_n) > 1

    @property
    def allocation(self) -> Allocation:
        """(B_p*, n*)."""
        return Allocation(self.rollouts_per_problem, self.problems_per_batch)


@dataclass(frozen=True)
class Crossover:
    """A compute at which n* changes."""

    compute: float
    compute_interval: Interval | None
    """Of the crossing of these two curves; None when it reaches beyond the range in which both were observed, or when the
    change is one of coverage."""
    before: int
    after: int
    problems_per_batch: int
    """B_p of the allocation that takes over."""
    kind: Literal["crossing", "coverage"]
    """``crossing``: the two curves cross, both observed. ``coverage``: the change comes from where an allocation's
    observed compute begins or ends, and says nothing about which n is better."""


def compute_grid(curves: Sequence[AllocationCurve], points: int = GRID_POINTS) -> Array:
    """Compute values, evenly spaced in log C, shape (points,); empty without curves.

    They run from the smallest observed compute to the end. A budget that is no multiple of a cell's batch is
    rounded, so cells that ran to the end stop within one batch of each other; the end is where the first
    of these stops, so that the last stretch does not fall to the cell with the smallest batch for want of
    rivals. (In units other than rollouts cells end far apart, and the last stretch is marked as uncontested.)
    """
    if not curves:
        return np.empty(0)
    furthest = max(curves, key=lambda curve: curve.fit.compute_max)
    ends = [
        curve.fit.compute_max
        for curve in curves
        if curve.fit.compute_max + max(curve.allocation.batch_rollouts, furthest.allocation.batch_rollouts)
        > furthest.fit.compute_max
    ]
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
    """For each n the best over B_p of the rewards observed at each compute."""
    n = np.array([allocation.rollouts_per_problem for allocation in land.allocations])
    values = np.unique(n)
    seen = np.where(land.observed, land.reward, -np.inf)
    reward = np.stack([seen[n == value].max(axis=0) for value in values])
    replicates = None
    if land.replicates is not None:
        replicates = np.stack(
            [
                _best_of_replicates(land.reward[n == v], land.replicates[n == v], land.observed[n == v])
                for v in values
            ]
        )
    return BestN(tuple(int(value) for value in values), reward, replicates)


def _best_of_replicates(reward: Array, replicates: Array, observed: NDArray[np.bool_]) -> Array:
    """(G, R) best over the allocations of one n, from (A, G), (A, G, R) and (A, G).

    The estimates differ between values of B_p also by noise. Noise drawn on top of that would make the best of nearly equal
    curves vary as one curve does, where the best of several varies less. So the share of the spread over B_p that noise
    explains is taken out before (shrinkage towards their mean, as James and Stein do).
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
    return np.where(observed[:, :, None], centre[:, :, None] + noise, -np.inf).max(axis=0)


def frontier_points(land: Landscape, confidence: float) -> list[FrontierPoint]:
    """The best observed allocation at each compute; a compute at which none was observed gives no point.

    Equal rewards go to the first allocation in the landscape's order.
    """
    if not land.curves:
        return []
    best = best_by_n(land)
    winner = np.where(land.observed, land.reward, -np.inf).argmax(axis=0)
    spreads = _spreads(land, best, winner, confidence)
    points = []
    for g in np.flatnonzero(land.observed.any(axis=0)):
        allocation = land.allocations[winner[g]]
        seen = [i for i in range(len(best.values)) if best.observed[i, g]]
        points.append(
            FrontierPoint(
                compute=float(land.compute[g]),
                reward=float(land.reward[winner[g], g]),
                reward_interval=_pair(spreads.reward[:, g]) if spreads else None,
                rollouts_per_problem=allocation.rollouts_per_problem,
                rollouts_per_problem_interval=_pair(2.0 ** spreads.log2_n[:, g]) if spreads else None,
                problems_per_batch=allocation.problems_per_batch,
                compared_n=tuple(best.values[i] for i in seen),
                not_worse_n=tuple(best.values[i] for i in seen if spreads.not_worse[i, g])
                if spreads
                else None,
            )
        )
    return points


@dataclass(frozen=True)
class _Spreads:
    """What the replicates say along a frontier."""

    reward: Array
    """(2, G) interval of the winning allocation's reward."""
    log2_n: Array
    """(2, G) interval of log2 n*."""
    not_worse: NDArray[np.bool_]
    """(n, G) whether an n cannot be told from n*."""


def _spreads(land: Landscape, best: BestN, winner: NDArray[np.intp], confidence: float) -> _Spreads | None:
    log2_n = best.log2_n_star_replicates
    if land.replicates is None or best.replicates is None or log2_n is None:
        return None
    tail = (1.0 - confidence) / 2.0
    at = np.arange(len(land.compute))
    n_of = np.array([allocation.rollouts_per_problem for allocation in land.allocations])
    leader = best.replicates[np.searchsorted(best.values, n_of[winner]), at]  # (G, R)
    behind = np.where(np.isfinite(best.replicates), best.replicates, -1e9) - np.maximum(leader, -1e9)
    return _Spreads(
        reward=np.quantile(land.replicates[winner, at], (tail, 1.0 - tail), axis=-1),
        log2_n=np.quantile(log2_n, (tail, 1.0 - tail), axis=-1, method="inverted_cdf"),
        not_worse=np.quantile(behind, 1.0 - tail, axis=-1) >= 0.0,
    )


def _pair(values: NDArray[np.floating]) -> Interval:
    return float(values[0]), float(values[1])


def crossovers(land: Landscape, points: Sequence[FrontierPoint], confidence: float) -> list[Crossover]:
    """Where n* changes along the frontier's points, in order of compute.

    A crossing is located where the two curves are equal; a change by coverage at the later of the two points.
    """
    row = {allocation: index for index, allocation in enumerate(land.allocations)}
    found = []
    for left, right in pairwise(points):
        if left.rollouts_per_problem == right.rollouts_per_problem:
            continue
        i, j = row[left.allocation], row[right.allocation]
        old, new = land.curves[i], land.curves[j]
        ends = (left.compute, right.compute)
        both = bool(old.fit.observes(ends).all() and new.fit.observes(ends).all())
        crossing = _crossing(old, new, *ends) if both else right.compute
        spread = None
        if both and land.replicates is not None:
            lead = land.replicates[j] - land.replicates[i]
            spread = _crossing_interval(
                land.compute, lead, land.observed[i] & land.observed[j], crossing, confidence
            )
        found.append(
            Crossover(
                compute=crossing,
                compute_interval=spread,
                before=left.rollouts_per_problem,
                after=right.rollouts_per_problem,
                problems_per_batch=right.problems_per_batch,
                kind="crossing" if both else "coverage",
            )
        )
    return found


def interval(replicates: Array, confidence: float) -> Interval:
    """The percentile interval of (R,) replicates."""
    tail = (1.0 - confidence) / 2.0
    return _pair(np.quantile(replicates, (tail, 1.0 - tail)))


def table_budgets(grid: Array) -> Array:
    """Budgets for a short table: the powers of two inside the grid's range and its end; empty for an empty
    grid."""
    if len(grid) == 0:
        return np.empty(0)
    powers = 2.0 ** np.arange(np.ceil(np.log2(grid[0])), np.floor(np.log2(grid[-1])) + 1)
    return np.unique(np.append(powers, grid[-1]))


def frontier_table(points: Sequence[FrontierPoint]) -> pd.DataFrame:
    """The frontier as a table, one row per point, for people: intervals and sets as text."""
    columns = ["compute", "reward", "reward_interval", "n_star", "n_star_interval", "not_worse_n"]
    columns += ["problems_per_batch", "compared_n"]
    rows = [
        (
            round(point.compute),
            point.reward,
            "" if point.reward_interval is None else "{:.3f} to {:.3f}".format(*point.reward_interval),
            point.rollouts_per_problem,
            ""
            if point.rollouts_per_problem_interval is None
            else "{:.0f} to {:.0f}".format(*point.rollouts_per_problem_interval),
            "" if point.not_worse_n is None else ", ".join(str(n) for n in point.not_worse_n),
            point.problems_per_batch,
            ", ".join(str(n) for n in point.compared_n),
        )
        for point in points
    ]
    return pd.DataFrame(rows, columns=columns)


def _crossing(old: AllocationCurve, new: AllocationCurve, left: float, right: float) -> float:
    """Where new overtakes old between two computes; old leads (or ties) at the left one, new at the right
    one."""

    def lead(log_c: float) -> float:
        return float(new.fit.predict(10.0**log_c) - old.fit.predict(10.0**log_c))

    low, high = np.log10(left), np.log10(right)
    if lead(low) * lead(high) >= 0.0:  # a tie at an end
        return right
    return float(10.0 ** brentq(lead, low, high))


def _crossing_interval(
    compute: Array, lead: Array, both: NDArray[np.bool_], near: float, confidence: float
) -> Interval | None:
    """The interval of where ``lead`` (G, R) turns positive, taking in each replicate the place nearest to
    ``near``. A replicate without such a place counts as one before the range (the new one leads throughout) or beyond it; None when
    the interval reaches there."""
    log_c = np.log10(compute)
    turns = (lead[:-1] < 0) & (lead[1:] >= 0) & (both[:-1] & both[1:])[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = lead[:-1] / (lead[:-1] - lead[1:])
    place = np.where(turns, log_c[:-1, None] + share * np.diff(log_c)[:, None], np.inf)
    distance = np.abs(place - np.log10(near))
    nearest = np.take_along_axis(place, distance.argmin(axis=0)[None], axis=0)[0]
    ahead = lead[both].mean(axis=0) > 0
    nearest = np.where(np.isfinite(nearest), nearest, np.where(ahead, -np.inf, np.inf))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(nearest, (tail, 1.0 - tail), method="inverted_cdf")
    return (float(10.0**low), float(10.0**high)) if np.isfinite([low, high]).all() else None

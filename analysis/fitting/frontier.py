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
from analysis.fitting.intervals import Interval, pair
from analysis.fitting.landscape import BestN, Landscape
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation


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


def frontier_points(land: Landscape, best: BestN, confidence: float) -> list[FrontierPoint]:
    """The best observed allocation at each compute; a compute at which none was observed gives no point.

    best: ``best_by_n`` of the landscape. Equal rewards go to the first allocation in the landscape's order.
    """
    if not land.curves:
        return []
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
                reward_interval=pair(spreads.reward[:, g]) if spreads else None,
                rollouts_per_problem=allocation.rollouts_per_problem,
                rollouts_per_problem_interval=pair(2.0 ** spreads.log2_n[:, g]) if spreads else None,
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

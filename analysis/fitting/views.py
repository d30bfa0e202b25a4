"""The same frontier seen in other ways, and by a fit that was not shown the largest budgets.

A conclusion that holds in one view alone is a conclusion about the view.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis.fitting.curves import AllocationCurve, fit_allocations
from analysis.fitting.frontier import frontier_points
from analysis.fitting.landscape import Landscape, best_by_n, compute_grid, landscape
from analysis.fitting.logistic import Array
from analysis.fitting.observations import MIN_POINTS, BasePoint, Observations
from analysis.fitting.questions import Question, answer, n_star
from analysis.fitting.records import record_breaking
from analysis.fitting.resampling import plan_resampling
from analysis.fitting.verdict import LawVerdict, NStar, judge_law
from analysis.options import FitOptions


@dataclass(frozen=True)
class Views:
    """n* by the curves through all points, and by three other ways."""

    table: pd.DataFrame
    """One row for each budget: ``compute``, then n* by ``all_points`` (the curves of the frontier), ``record_points``
    (curves through record-breaking points, the paper's way) and ``isotonic`` (no parametric curve). Missing where no
    allocation was observed or has such a curve."""
    law_by_record_points: LawVerdict
    record_frontier: pd.DataFrame
    """The record-breaking evaluations of the whole grid: compute, reward, rollouts_per_problem, problems_per_batch. No curve at
    all; biased upwards by the noise of the best."""
    law_of_record_frontier: LawVerdict


def other_views(
    land: Landscape, groups: Sequence[Observations], budgets: Array, options: FitOptions
) -> Views:
    """Compute them, without intervals."""
    # The same curves, seen through record-breaking points.
    by_records = [
        replace(curve, fit=curve.by_records, replicates=None) for curve in land.curves if curve.by_records
    ]
    recorded = landscape(by_records, land.compute)
    best = best_by_n(recorded)
    points = frontier_points(recorded, best, options.confidence)
    records = _record_frontier(groups, options)
    table = pd.DataFrame(
        {
            "compute": budgets,
            "all_points": _n_at(land.curves, [curve.fit.predict(budgets) for curve in land.curves], budgets),
            "record_points": _n_at(by_records, [curve.fit.predict(budgets) for curve in by_records], budgets),
            "isotonic": _n_at(
                land.curves, [curve.isotonic.predict(budgets) for curve in land.curves], budgets
            ),
        }
    )
    return Views(
        table=table,
        law_by_record_points=judge_law(
            n_star(recorded, best, points, groups, options.confidence), options.confidence
        ),
        record_frontier=records,
        law_of_record_frontier=_law_of_points(records, land, options),
    )


def _n_at(curves: Sequence[AllocationCurve], rewards: Sequence[Array], compute: Array) -> pd.Series:
    """n of the largest observed reward at each compute, missing where there is none."""
    if not curves:
        return pd.Series([pd.NA] * len(compute), dtype="Int64")
    observed = np.array([curve.fit.observes(compute) for curve in curves])
    n = np.array([curve.allocation.rollouts_per_problem for curve in curves])
    winner = np.where(observed, np.array(rewards), -np.inf).argmax(axis=0)
    values = pd.Series(n[winner], dtype="Int64")
    return values.where(pd.Series(observed.any(axis=0)))


def _record_frontier(groups: Sequence[Observations], options: FitOptions) -> pd.DataFrame:
    parts = [
        pd.DataFrame(
            {
                "compute": group.compute,
                "reward": group.reward,
                "rollouts_per_problem": group.allocation.rollouts_per_problem,
                "problems_per_batch": group.allocation.problems_per_batch,
            }
        )
        for group in groups
    ]
    if not parts:
        return pd.DataFrame(columns=["compute", "reward", "rollouts_per_problem", "problems_per_batch"])
    everything = pd.concat(parts).sort_values("compute", kind="stable", ignore_index=True)
    # Neighbours here belong to different cells, so a moving average over them would mean nothing.
    return everything.iloc[record_breaking(everything["reward"], options.record_bin)].reset_index(drop=True)


def _law_of_points(records: pd.DataFrame, land: Landscape, options: FitOptions) -> LawVerdict:
    n = records["rollouts_per_problem"].to_numpy(dtype=np.float64)
    grid_n = tuple(sorted({allocation.rollouts_per_problem for allocation in land.allocations}))
    at_edge = len(n) > 0 and n.max() == grid_n[-1]
    stars = NStar(
        x=np.log10(records["compute"].to_numpy(dtype=np.float64)),
        log2_n=np.log2(n),
        replicates=None,
        grid_n=grid_n,
        evaluations=len(records),
        unrejected_n=None,
        edge=max(land.allocations) if at_edge else None,
    )
    return judge_law(stars, options.confidence)


@dataclass(frozen=True)
class HeldOut:
    """What a fit on small budgets says about large ones, against what was observed there."""

    fitted_to: float
    """C1: only evaluations with C <= C1 were used."""
    allocations: int
    """With enough evaluations up to C1 for a curve."""
    law: LawVerdict
    """Of the small budgets."""
    table: pd.DataFrame
    """One row for each budget above C1: ``compute``; ``n_star`` and ``reward``, the whole grid's frontier; ``n_by_curves``,
    the extrapolated curves' best; ``n_by_law``, the law's n, missing when it is not identified; ``reward_by_curves``, the
    predicted reward of the best; ``regret``, the reward lost at this budget, by the whole grid's curves, by training with
    the allocation that the extrapolated curves chose."""

    @property
    def reward_error(self) -> float | None:
        """Mean absolute error of the predicted reward."""
        if self.table.empty:
            return None
        return float((self.table["reward_by_curves"] - self.table["reward"]).abs().mean())

    @property
    def doublings_error(self) -> float | None:
        """Mean absolute error of log2 n by the curves."""
        if self.table.empty:
            return None
        ratio = self.table["n_by_curves"].astype(float) / self.table["n_star"].astype(float)
        return float(np.log2(ratio).abs().mean())


def held_out_check(
    land: Landscape, groups: Sequence[Observations], base: BasePoint | None, options: FitOptions
) -> HeldOut | None:
    """Fit on C <= held_out * C_max and predict up to C_max. None when fewer than two allocations reach far enough."""
    if not len(land.compute):
        return None
    limit = options.held_out * float(land.compute[-1])
    early = [group.up_to(limit) for group in groups]
    early = [group for group in early if len(np.unique(group.compute)) >= MIN_POINTS]
    if len(early) < 2:
        return None
    curves = fit_allocations(early, base, options, plan_resampling(early, 0, options.seed))
    known = landscape(curves, compute_grid(curves, options.compute == "rollouts"))
    law = answer([Question("nothing")], known, early, options.confidence)[0].law
    budgets = np.unique(np.clip(np.geomspace(limit, land.compute[-1], 9)[1:], None, land.compute[-1]))
    actual = landscape(land.curves, budgets)
    seen = np.where(actual.observed, actual.reward, -np.inf)
    n = np.array([allocation.rollouts_per_problem for allocation in actual.allocations])
    row = {allocation: index for index, allocation in enumerate(actual.allocations)}
    # Only what was observed at a budget can be checked there.
    rows = [row[curve.allocation] for curve in curves]
    predicted = np.where(
        actual.observed[rows], np.array([curve.fit.predict(budgets) for curve in curves]), -np.inf
    )
    chosen = [curves[i].allocation for i in predicted.argmax(axis=0)]
    best = seen.max(axis=0)
    table = pd.DataFrame(
        {
            "compute": budgets,
            "n_star": n[seen.argmax(axis=0)],
            "reward": best,
            "n_by_curves": [allocation.rollouts_per_problem for allocation in chosen],
            "n_by_law": law.fit.predict(budgets) if law.fit else np.full(len(budgets), np.nan),
            "reward_by_curves": predicted.max(axis=0),
            "regret": [best[i] - actual.reward[row[a], i] for i, a in enumerate(chosen)],
        }
    )
    return HeldOut(
        limit, len(early), law, table[np.isfinite(table["reward_by_curves"])].reset_index(drop=True)
    )

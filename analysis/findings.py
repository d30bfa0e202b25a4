"""From a run's tables to everything that its report says, as data and in words.

Works on a half-finished grid: what is missing is named, and nothing is guessed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.curves import CellCurve, fit_cells
from analysis.frontier import Crossover, FrontierPoint, compute_grid, crossovers, envelope, table_budgets
from analysis.law import LawVerdict, judge_law
from analysis.tables import headline_metric, metric_columns
from grids.errors import UserError

_NO_METRIC = "avg_at_K"  # stands for the headline metric while nothing has been evaluated yet


@dataclass(frozen=True)
class Analysis:
    """Everything that the report says, as data."""

    metric: str
    base_reward: float | None
    history: pd.DataFrame
    states: dict[str, str]
    reasons: dict[str, str]
    curves: list[CellCurve]
    unfitted: dict[str, str]
    points: list[FrontierPoint]
    budgets: list[FrontierPoint]
    """The frontier at a few budgets."""
    changes: list[Crossover]
    verdict: LawVerdict

    @property
    def missing(self) -> list[str]:
        """The holes of the grid, one sentence each."""
        holes = []
        for cell in sorted({*self.states, *self.unfitted, *self.history["cell"]}):
            words = []
            state = self.states.get(cell, "unknown")
            if state != "finished":
                words.append(f"{state} ({self.reasons[cell]})" if cell in self.reasons else state)
            if cell in self.unfitted:
                words.append(f"not fitted: {self.unfitted[cell]}")
            if words:
                holes.append(f"{cell}: {'; '.join(words)}")
        return holes

    @property
    def sentences(self) -> list[str]:
        """The verdict in words: where n* changes, then what is known of the law."""
        return [_changes_in_words(self.points, self.changes), self.verdict.text]


def analyse(
    history: pd.DataFrame,
    base: Mapping[str, Any] | None,
    states: dict[str, str],
    reasons: dict[str, str],
    metric: str | None = None,
) -> Analysis:
    """From tables to the frontier and the law's verdict, wherever the tables come from.

    history: columns as in ``tables.HISTORY_COLUMNS``; base: the base model's row, or None; states, reasons:
    by cell id.
    """
    known = metric_columns(history)
    chosen = metric or headline_metric(known) or headline_metric(list(base or {})) or _NO_METRIC
    if known and chosen not in known:
        raise UserError(f"metric '{chosen}' is not in the history; choose one of {', '.join(known)}")
    if chosen not in history.columns:
        history = history.assign(**{chosen: pd.Series(dtype=float)})
    base_reward = _finite_or_none((base or {}).get(chosen))
    curves, unfitted = fit_cells(history, chosen, base_reward)
    for cell in states:
        if cell not in unfitted and not (history["cell"] == cell).any():
            unfitted[cell] = "no evaluation yet"
    grid = compute_grid(curves)
    points = envelope(curves, grid)
    return Analysis(
        metric=chosen,
        base_reward=base_reward,
        history=history,
        states=states,
        reasons=reasons,
        curves=curves,
        unfitted=unfitted,
        points=points,
        budgets=envelope(curves, table_budgets(grid)),
        changes=crossovers(curves, points),
        verdict=judge_law(points, [curve.rollouts_per_problem for curve in curves]),
    )


def short_count(value: float) -> str:
    """A count in few characters: 950, 1.5k, 32k, 2.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _changes_in_words(points: list[FrontierPoint], changes: list[Crossover]) -> str:
    contested = [point for point in points if point.is_contested]
    if not points:
        return "There is no frontier yet: no cell has enough evaluations for a curve."
    first, last = (short_count(point.compute_rollouts) for point in (points[0], points[-1]))
    span = f"from C = {first} to {last} rollouts"
    if not contested:
        return f"No two values of n were observed at the same compute ({span}), so n*(C) is open."
    crossing = [change for change in changes if change.kind == "crossing"]
    coverage = len(changes) - len(crossing)
    if crossing:
        steps = (f"{c.before} to {c.after} at C = {short_count(c.compute_rollouts)}" for c in crossing)
        words = f"The compute-optimal n goes from {', from '.join(steps)} (observed {span})."
    else:
        values = sorted({point.rollouts_per_problem for point in contested})
        words = f"No two leading curves cross ({span}); n* = {', '.join(str(n) for n in values)}."
    if coverage:
        words += f" Changes of n* only because a cell's observed compute begins or ends: {coverage}."
    return words


def _finite_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

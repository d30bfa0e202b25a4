"""From a study's tables to everything that its report says, as data.

Works on a half-finished grid: what is missing is named, and nothing is guessed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.fitting.curves import AllocationCurve, CurveFit, fit_allocations, fit_cells
from analysis.fitting.frontier import FrontierPoint, frontier_points
from analysis.fitting.landscape import Landscape, best_by_n, compute_grid, landscape, table_budgets
from analysis.fitting.observations import BasePoint, Observations, base_point, observe
from analysis.fitting.questions import Frontier, answer, questions
from analysis.fitting.resampling import Resampling, plan_resampling
from analysis.fitting.views import HeldOut, Views, held_out_check, other_views
from analysis.options import FitOptions
from analysis.tables import COMPUTE_COLUMNS, GridTables, headline_metric, metric_columns
from grids.errors import UserError

_NO_METRIC = "avg_at_K"  # stands for the headline metric while nothing has been evaluated yet


@dataclass(frozen=True)
class Analysis:
    """Everything that the report says, as data."""

    tables: GridTables
    options: FitOptions
    metric: str
    base_reward: float | None
    groups: list[Observations]
    """What was fitted, by allocation."""
    cell_fits: dict[str, CurveFit]
    """Each cell by itself."""
    unfitted: dict[str, str]
    """Cells that have no curve, and why."""
    resampling: Resampling
    """What the intervals hold and what they do not."""
    land: Landscape
    """The allocations' curves over the compute grid."""
    frontiers: list[Frontier]
    """By question; the first one leaves n, B_p and M free."""
    budgets: list[FrontierPoint]
    """The first frontier at a few budgets."""
    views: Views
    held_out: HeldOut | None

    @property
    def frontier(self) -> Frontier:
        """The first question's."""
        return self.frontiers[0]

    @property
    def curves(self) -> tuple[AllocationCurve, ...]:
        """By n and B_p."""
        return self.land.curves

    @property
    def missing(self) -> list[str]:
        """The holes of the grid and what was wrong with its rows, one sentence for each cell."""
        tables = self.tables
        holes = []
        for cell in sorted({*tables.states, *tables.complaints, *self.unfitted}):
            words = []
            state = tables.states.get(cell, "finished")
            if state != "finished":
                words.append(f"{state} ({tables.reasons[cell]})" if cell in tables.reasons else state)
            words += tables.complaints.get(cell, [])
            if cell in self.unfitted:
                words.append(f"not fitted: {self.unfitted[cell]}")
            if words:
                holes.append(f"{cell}: {'; '.join(words)}")
        return holes


def analyse(tables: GridTables, options: FitOptions | None = None) -> Analysis:
    """From tables to frontiers, laws and intervals, wherever the tables come from.

    Raises UserError for a metric that the history does not have or whose values are no shares; a grid with holes is
    analysed as it is.
    """
    options = options or FitOptions()
    metric, history = _choose_metric(tables, options.metric)
    base = base_point(tables.base, metric)
    groups, unfitted = observe(
        history, metric, COMPUTE_COLUMNS[options.compute], with_scores=options.replicates > 0
    )
    for cell in {*tables.states, *tables.complaints} - {"base", "grid", *history["cell"].unique()}:
        if cell not in unfitted:
            unfitted[cell] = "no evaluation yet" if cell in tables.states else "no usable row"
    resampling = plan_resampling(groups, options.replicates, options.seed)
    curves = fit_allocations(groups, base, options, resampling)
    land = landscape(curves, compute_grid(curves, options.compute == "rollouts"))
    budgets = table_budgets(land.compute)
    at_budgets = landscape(curves, budgets)
    return Analysis(
        tables=tables,
        options=options,
        metric=metric,
        base_reward=base.reward if base else None,
        groups=groups,
        cell_fits=_cell_fits(groups, curves, base),
        unfitted=unfitted,
        resampling=resampling,
        land=land,
        frontiers=answer(questions(curves, options.compute == "rollouts"), land, groups, options.confidence),
        budgets=frontier_points(at_budgets, best_by_n(at_budgets), options.confidence),
        views=other_views(land, groups, budgets, options),
        held_out=held_out_check(land, groups, base, options),
    )


def _cell_fits(
    groups: Sequence[Observations], curves: Sequence[AllocationCurve], base: BasePoint | None
) -> dict[str, CurveFit]:
    """Fits of single cells; the only cell of an allocation has its allocation's curve."""
    several = [group for group in groups if len(group.cells) > 1]
    alone = {curve.cells[0]: curve.fit for curve in curves if len(curve.cells) == 1}
    return alone | fit_cells(several, base)


def _choose_metric(tables: GridTables, wanted: str | None) -> tuple[str, pd.DataFrame]:
    history = tables.history
    known = metric_columns(history)
    metric = wanted or headline_metric(known) or headline_metric(list(tables.base or {})) or _NO_METRIC
    if known and metric not in history.columns:
        raise UserError(f"--metric: '{metric}' is not in the table; choose one of {', '.join(known)}")
    if metric not in history.columns:
        return metric, history.assign(**{metric: pd.Series(dtype=float)})
    if len(history) and not pd.api.types.is_numeric_dtype(history[metric]):
        raise UserError(
            f"--metric: '{metric}' holds no single number a row; choose one of {', '.join(known)}"
        )
    values = pd.to_numeric(history[metric])
    if values.min() < 0 or values.max() > 1:
        raise UserError(
            f"--metric: '{metric}' has values outside 0 to 1 ({values.min():g} to {values.max():g}); "
            "a curve is fitted to a share, so divide it by its largest possible value"
        )
    return metric, history


def short_count(value: float) -> str:
    """A count in few characters: 950, 1.5k, 32k, 2.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def finite_or_none(value: float) -> float | None:
    """The value, None for NaN and infinities: JSON has neither."""
    return value if math.isfinite(value) else None

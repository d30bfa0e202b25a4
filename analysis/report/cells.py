"""Every cell that is known, fitted or not, as the report lists it."""

from dataclasses import asdict
from typing import Any

import pandas as pd

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.findings import Analysis
from analysis.fitting.curves import CurveFit
from analysis.tables import COMPUTE_COLUMNS

_SHAPE = ("problems_per_batch", "rollouts_per_problem", "seed")
_ORDER = ("rollouts_per_problem", "problems_per_batch", "seed")
_NO_CELLS = {"base", "grid"}  # complaints about the base model's row and the grid as a whole


def cell_records(analysis: Analysis, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One record for each cell, by n, B_p and seed; cells without a row last, by name."""
    tables = analysis.tables
    groups = {str(cell): rows for cell, rows in tables.history.groupby("cell", sort=True)}
    shapes = {cell: {name: int(rows[name].iloc[0]) for name in _SHAPE} for cell, rows in groups.items()}
    without = sorted({*tables.states, *tables.complaints} - set(groups) - _NO_CELLS)
    known = sorted(groups, key=lambda cell: (*(shapes[cell][name] for name in _ORDER), cell))
    return [
        _record(cell, shapes.get(cell), groups.get(cell), analysis, diagnosis) for cell in [*known, *without]
    ]


def fit_record(fit: CurveFit) -> dict[str, Any]:
    """A fit's numbers as JSON values."""
    return asdict(fit) | {"on_bound": list(fit.on_bound)}


def _record(
    cell: str,
    shape: dict[str, int] | None,
    rows: pd.DataFrame | None,
    analysis: Analysis,
    diagnosis: Diagnosis,
) -> dict[str, Any]:
    tables, fit = analysis.tables, analysis.cell_fits.get(cell)
    compute, reward = ([], []) if rows is None else _points(rows, analysis)
    remarks = [*tables.complaints.get(cell, [])]
    remarks += [f"not bit for bit an undisturbed run: {words}" for words in tables.deviations.get(cell, ())]
    if cell in analysis.unfitted:
        remarks.append(f"not fitted: {analysis.unfitted[cell]}")
    if fit is not None:
        remarks += [f"on a bound: {words}" for words in fit.on_bound]
        remarks += [] if fit.converged else ["the fit did not converge"]
    return {
        "cell": cell,
        **(shape or dict.fromkeys(_SHAPE)),
        "state": tables.states.get(cell),
        "state_reason": tables.reasons.get(cell),
        "compute": compute,
        "reward": reward,
        "score_noise": diagnosis.score_noise.get(cell),
        "fit": None if fit is None else fit_record(fit),
        "not_fitted": analysis.unfitted.get(cell),
        "remarks": remarks,
    }


def _points(rows: pd.DataFrame, analysis: Analysis) -> tuple[list[float], list[float]]:
    """Compute and score of the evaluations that have both."""
    column = COMPUTE_COLUMNS[analysis.options.compute]
    if column not in rows.columns or analysis.metric not in rows.columns:
        return [], []
    pairs = rows[[column, analysis.metric]].apply(pd.to_numeric, errors="coerce").dropna()
    pairs = pairs[pairs[column] > 0]
    return pairs[column].astype(float).tolist(), pairs[analysis.metric].astype(float).tolist()

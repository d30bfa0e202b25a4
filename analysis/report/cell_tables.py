"""The report's tables about cells, allocations and training, as texts."""

from collections.abc import Sequence
from typing import Any

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.diagnostics.training import HEALTH_COLUMNS
from analysis.findings import Analysis, short_count
from analysis.report.blocks import Table
from analysis.report.result_tables import NOTHING, compute_heading, number
from analysis.report.words import UNIT_WORDS
from analysis.tables import metric_label

_QUANTITIES = {
    "within_n": "n, at equal B_p",
    "within_problems": "B_p, at equal n",
    "best_n": "n, each at its best B_p",
    "best_problems": "B_p, each at its best n",
}


def cells_table(cells: Sequence[dict[str, Any]], analysis: Analysis) -> Table:
    """Every known cell. cells: as ``cell_records`` gives them."""
    rows = []
    for cell in cells:
        fit, remarks = cell["fit"], list(cell["remarks"])
        state = cell["state"] or NOTHING
        if cell["state_reason"]:
            remarks.insert(0, cell["state_reason"])
        rows.append(
            [
                cell["cell"],
                state,
                f"{cell['compute'][-1]:,.0f}" if cell["compute"] else NOTHING,
                number(cell["reward"][-1] if cell["reward"] else None, ".3f"),
                str(len(cell["compute"])),
                number(fit and fit["rmse"], ".4f"),
                number(cell["score_noise"], ".4f"),
                number(fit and fit["ceiling"], ".3f"),
                "; ".join(remarks),
            ]
        )
    columns = ("cell", "state", compute_heading(analysis), f"last {metric_label(analysis.metric)}")
    return Table(
        title="All cells",
        columns=(*columns, "points", "RMSE", "noise", "ceiling A", "remarks"),
        rows=rows,
        text_columns=frozenset({"state", "remarks"}),
        note="RMSE: of the points around the cell's own curve. Noise: what the K answers a problem alone would give; an "
        "RMSE far above it says that the curve misses the points. The ceiling is an extrapolation unless the curve levels "
        "inside the observed C.",
    )


def allocations_table(analysis: Analysis) -> Table:
    """The curve of every allocation, through all points and through record-breaking ones."""
    rows = []
    for curve in analysis.curves:
        fit, records = curve.fit, curve.by_records
        bounds = [*fit.on_bound] + ([] if fit.converged else ["not converged"])
        rows.append(
            [
                curve.allocation.name,
                str(len(curve.cells)),
                str(fit.points),
                f"{short_count(fit.compute_min)} to {short_count(fit.compute_max)}",
                number(fit.start, ".3f"),
                number(fit.ceiling, ".3f"),
                short_count(fit.midpoint),
                number(fit.steepness, ".2f"),
                number(fit.rmse, ".4f"),
                number(records.ceiling if records else None, ".3f"),
                "; ".join(bounds),
            ]
        )
    columns = ("allocation", "cells", "points", "observed C", "R0", "A", "Cmid", "s", "RMSE", "A by records")
    return Table(
        title="Curves",
        columns=(*columns, "on a bound"),
        rows=rows,
        text_columns=frozenset({"on a bound"}),
        note="R(C) = R0 + (A − R0) / (1 + (Cmid / C)^s), one curve through all seeds of an allocation. A by records: the "
        "ceiling of the curve through record-breaking points.",
    )


def sensitivity_rows(diagnosis: Diagnosis, analysis: Analysis) -> Table:
    """What the choices of n and of B_p are worth."""
    rows = [
        [
            _QUANTITIES[row["quantity"]],
            number(row["points"], ".1f"),
            NOTHING if number(row["low"]) == NOTHING else f"{row['low']:.1f} to {row['high']:.1f}",
            number(row["noise"], ".1f"),
            number(row["noise_high"], ".1f"),
        ]
        for row in diagnosis.sensitivity.to_dict("records")
    ]
    at = "" if diagnosis.compared_at is None else short_count(diagnosis.compared_at)
    return Table(
        title=f"Range of {metric_label(analysis.metric)} at C = {at}",
        columns=("choice", "points", "interval", "by noise", "by noise, at most"),
        rows=rows,
        note="Points are hundredths of the score. Noise pushes every range upwards and the interval is corrected for that, so "
        "it may lie below the range itself. By noise: the range among equal allocations, median and upper bound.",
    )


def best_n_rows(diagnosis: Diagnosis, analysis: Analysis) -> Table:
    """The best n at each B_p, by metric."""
    rows = []
    for row in diagnosis.best_n.to_dict("records"):
        spread = NOTHING if number(row["n_low"]) == NOTHING else f"{row['n_low']:.0f} to {row['n_high']:.0f}"
        rows.append(
            [
                metric_label(row["metric"]),
                str(row["problems_per_batch"]),
                str(row["best_n"]),
                spread,
                number(row["agreement"], ".0%"),
                f"{row['smallest_n']} to {row['largest_n']}",
                "yes" if row["on_edge"] else "no",
            ]
        )
    at = "" if diagnosis.compared_at is None else short_count(diagnosis.compared_at)
    unit = UNIT_WORDS[analysis.options.compute]
    return Table(
        title=f"Best n at each B_p, by metric, at C = {at} {unit}",
        columns=("metric", "B_p", "best n", "interval", "agreement", "n compared", "on the edge"),
        rows=rows,
        note="By the evaluations nearest to this C. Agreement: share of bootstrap replicates with this best n. On the edge: "
        "the best n is the smallest or largest compared, so a better one may lie outside.",
    )


def overfitting_rows(diagnosis: Diagnosis) -> Table:
    """Cells whose validation score has fallen."""
    rows = [
        [
            row["cell"],
            row["verdict"],
            f"{row['onset_compute']:,.0f}",
            number(row["onset_epochs"], ".2f"),
            number(100.0 * row["drop"], ".1f"),
            number(100.0 * row["drop_at_least"], ".1f"),
            number(100.0 * row["training_change"], "+.1f"),
            row["training"] or NOTHING,
        ]
        for row in diagnosis.overfitting.to_dict("records")
        if row["verdict"] in ("overfits", "collapses", "falls")
    ]
    return Table(
        title="Cells whose validation score has fallen",
        columns=(
            "cell",
            "verdict",
            "onset C (rollouts)",
            "epochs",
            "fall",
            "at least",
            "training",
            "training column",
        ),
        rows=rows,
        text_columns=frozenset({"verdict", "training column"}),
        note="In points. Fall: best window of rows minus the last one. Training: change of the training score between the same "
        "windows. Overfits: validation has fallen, training has not. Collapses: both have.",
    )


def interference_rows(diagnosis: Diagnosis) -> Table:
    """Problems unlearned and learned since the base model."""
    rows = [
        [
            row["cell"],
            f"{row['compute_rollouts']:,.0f}",
            f"{row['lost']} of {row['solved_by_base']}",
            number(row["lost_by_chance"], ".1f"),
            f"{row['gained']} of {row['unsolved_by_base']}",
            number(row["gained_by_chance"], ".1f"),
        ]
        for row in diagnosis.interference.to_dict("records")
    ]
    answers = diagnosis.histograms.answers
    return Table(
        title="Interference on the training probe",
        columns=("cell", "C (rollouts)", "lost", "by chance", "gained", "by chance "),
        rows=rows,
        note=f"Lost: problems that the base model solves at times and the cell never in {answers} answers. Gained: the "
        "reverse. By chance: the number expected had nothing changed.",
    )


def training_rows(diagnosis: Diagnosis) -> Table:
    """First and last value of what tells whether a cell trains as it should."""
    summary = diagnosis.training
    present = [name for name in HEALTH_COLUMNS if name in set(summary["quantity"])]
    rows = []
    for cell, own in summary.groupby("cell", sort=True):
        values = {row["quantity"]: row for row in own.to_dict("records")}
        texts = [
            f"{values[name]['first']:.3g} → {values[name]['last']:.3g}" if name in values else NOTHING
            for name in present
        ]
        rows.append([str(cell), *texts])
    return Table(
        title="Training, first to last evaluated row",
        columns=("cell", *present),
        rows=rows,
        note="zero_variance_right and _wrong: share of groups in which every answer was right or wrong, which teach nothing. "
        "entropy and kl in nats, response_tokens in tokens a rollout.",
    )

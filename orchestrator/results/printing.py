"""What a fit prints: the frontier, the verdict in words, what is missing, and where the report lies."""

from typing import Any

import rich.console

from analysis.fitting.frontier import FrontierPoint
from analysis.report import Report
from analysis.tables import metric_label
from orchestrator.tables import Format, print_rows

_UNITS = {"rollouts": "rollouts", "tokens": "tokens", "accelerator_seconds": "accelerator-s"}
_MOST_HOLES = 20  # more are only counted; the report names them all


def print_report(report: Report, console: rich.console.Console) -> None:
    """The frontier at a few budgets, the verdict, the holes, and the report's path."""
    analysis = report.analysis
    if analysis.budgets:
        console.print("\nCompute-optimal frontier (inside observed compute):", markup=False)
        unit, metric = _UNITS[analysis.options.compute], metric_label(analysis.metric)
        print_rows([_row(point, unit, metric) for point in analysis.budgets], Format.TABLE, console)
    console.print()
    for sentence in report.verdict:
        console.print(sentence, markup=False)
    if report.missing:
        console.print("\nHoles and doubts, by cell:", markup=False)
    for hole in report.missing[:_MOST_HOLES]:
        console.print(f"  {hole}", markup=False)
    if len(report.missing) > _MOST_HOLES:
        console.print(f"  and {len(report.missing) - _MOST_HOLES} more, see the report", markup=False)
    console.print(f"\nreport: {report.paths['report.html']}", markup=False)


def _row(point: FrontierPoint, unit: str, metric: str) -> dict[str, Any]:
    """One line of the table; narrow enough for 80 columns."""
    row: dict[str, Any] = {f"C ({unit})": round(point.compute), metric: round(point.reward, 3)}
    if point.reward_interval:
        row["interval"] = "{:.3f} to {:.3f}".format(*point.reward_interval)
    row["n*"] = point.rollouts_per_problem
    if point.rollouts_per_problem_interval:
        row["n* interval"] = "{:.0f} to {:.0f}".format(*point.rollouts_per_problem_interval)
    row["B_p*"] = point.problems_per_batch
    if point.not_worse_n is not None:
        row["not worse n"] = ", ".join(map(str, point.not_worse_n))
    return row

"""What a fit prints: the frontier, n*(C), the verdict, and where the report lies."""

import json

import rich.console

from analysis.report import Report
from orchestrator.tables import Format, print_rows


def print_report(report: Report, console: rich.console.Console) -> None:
    """The frontier table, the verdict on the law in words, what is missing, and the report's path."""
    rows = json.loads(report.frontier.to_json(orient="records"))
    if rows:
        console.print("\nCompute-optimal frontier (within observed compute):", markup=False)
        print_rows(rows, Format.TABLE, console)
    console.print(f"\n{report.verdict}", markup=False)
    for hole in report.missing:
        console.print(f"missing: {hole}", markup=False)
    console.print(f"\nreport: {report.paths['report.html']}", markup=False)

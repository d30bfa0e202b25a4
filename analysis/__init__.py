"""From history tables to frontiers, allocation laws, prescriptions, figures and the report.

``tables_from_frame`` or ``read_sources`` make tables, ``analyse`` fits them, ``prescribe`` splits a budget, ``write_report``
writes the report; docs/analysis.md has an example. Nothing here imports ray, torch, vllm or mlflow.
"""

from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from analysis.prescribing.prescription import Prescription, prescribe
from analysis.reading.sources import read_run, read_sources, read_table, tables_from_frame
from analysis.report import Report, write_report
from analysis.synthetic import SyntheticGrid, SyntheticLaw, synthetic_grid
from analysis.tables import HISTORY_COLUMNS, GridTables

__all__ = [
    "HISTORY_COLUMNS",
    "Analysis",
    "FitOptions",
    "GridTables",
    "Prescription",
    "Report",
    "SyntheticGrid",
    "SyntheticLaw",
    "analyse",
    "prescribe",
    "read_run",
    "read_sources",
    "read_table",
    "synthetic_grid",
    "tables_from_frame",
    "write_report",
]

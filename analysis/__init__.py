"""From history tables to frontiers, allocation laws, figures and the report.

The steps, each in its own module and each usable alone:

- ``tables``: a run folder's files as data frames; owns the list of history columns;
- ``curves``: one bounded monotone sigmoid of reward in compute per cell;
- ``frontier``: the upper envelope of the curves inside observed compute, n*(C) and where it changes;
- ``law``: the allocation law of n*(C), or the reasons why it is not identified;
- ``findings``: the steps above joined: everything the report says, as data and in words;
- ``figures``: the frontier figure and the n*(C) figure;
- ``report``: all of the above written into ``<run>/report/``.

Nothing here imports ray, torch, vllm or mlflow.
"""

from analysis.curves import CellCurve, CurveFit, fit_cells, fit_curve
from analysis.findings import Analysis, analyse
from analysis.frontier import Crossover, FrontierPoint, crossovers, envelope
from analysis.law import LawFit, LawVerdict, fit_law, judge_law
from analysis.report import Report, write_report
from analysis.tables import HISTORY_COLUMNS, read_base, read_history, read_reasons, read_states

__all__ = [
    "HISTORY_COLUMNS",
    "Analysis",
    "CellCurve",
    "Crossover",
    "CurveFit",
    "FrontierPoint",
    "LawFit",
    "LawVerdict",
    "Report",
    "analyse",
    "crossovers",
    "envelope",
    "fit_cells",
    "fit_curve",
    "fit_law",
    "judge_law",
    "read_base",
    "read_history",
    "read_reasons",
    "read_states",
    "write_report",
]

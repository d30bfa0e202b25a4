"""The diagnostics of one analysis, computed once for the verdict, the figures, the page and ``frontier.json``."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.diagnostics.final_scores import best_n_table, common_compute, sensitivity_table
from analysis.diagnostics.overfitting import overfitting_onset
from analysis.diagnostics.pools import PoolsAtWork, pools_at_work
from analysis.diagnostics.training import (
    ProbeHistograms,
    epochs_at,
    interference,
    pass_rate_histograms,
    training_summary,
)
from analysis.findings import Analysis
from analysis.fitting.frontier import Crossover
from analysis.fitting.observations import Observations
from analysis.tables import is_metric, samples_per_problem


@dataclass(frozen=True)
class Diagnosis:
    """What happened besides the frontier. Frames are empty where the table lacks the columns."""

    compared_at: float | None
    """The compute of ``sensitivity`` and ``best_n``, as ``common_compute`` gives it."""
    sensitivity: pd.DataFrame
    """As ``sensitivity_table`` gives it."""
    best_n: pd.DataFrame
    """As ``best_n_table`` gives it."""
    overfitting: pd.DataFrame
    """As ``overfitting_onset`` gives it."""
    interference: pd.DataFrame
    """As ``interference`` gives it."""
    training: pd.DataFrame
    """As ``training_summary`` gives it."""
    histograms: ProbeHistograms
    epochs: dict[Crossover, float]
    """Epochs of the overtaking allocation's own run at each crossing of the first frontier; only in rollouts."""
    score_noise: dict[str, float]
    """By fitted cell: as ``score_noise`` gives it, where it is known."""
    pools: PoolsAtWork | None
    """As ``pools_at_work`` gives it."""


def diagnose(analysis: Analysis) -> Diagnosis:
    """Compute the diagnostics of an analysis."""
    tables = analysis.tables
    crossings = [change for change in analysis.frontier.changes if change.kind == "crossing"]
    epochs: dict[Crossover, float] = {}
    if analysis.options.compute == "rollouts":
        places = [(change.compute, change.after, change.problems_per_batch) for change in crossings]
        found = epochs_at(tables.history, places)["epochs"]
        epochs = {
            change: float(value)
            for change, value in zip(crossings, found, strict=True)
            if np.isfinite(float(value))
        }
    cells = [group.of_cell(index) for group in analysis.groups for index in range(len(group.cells))]
    noise = {cell.cells[0]: score_noise(cell, analysis.metric) for cell in cells}
    return Diagnosis(
        compared_at=common_compute(analysis.groups),
        sensitivity=sensitivity_table(analysis),
        best_n=best_n_table(analysis),
        overfitting=overfitting_onset(tables.history, analysis.metric, tables.base),
        interference=interference(tables.history, tables.base),
        training=training_summary(tables.history),
        histograms=pass_rate_histograms(tables.history, tables.base),
        epochs=epochs,
        score_noise={cell: value for cell, value in noise.items() if value is not None},
        pools=pools_at_work(tables.phases),
    )


def score_noise(cell: Observations, metric: str) -> float | None:
    """Standard deviation of a score that comes from the K answers alone, the problems being the same: the root of the
    mean over evaluations of sum_p r_p (1 - r_p) / ((K - 1) P^2), r_p the share of right answers to a problem.

    A curve whose RMSE is near it leaves nothing to explain. None without per-problem scores, for other
    metrics than avg_at_K, and for K = 1.
    """
    if cell.scores is None or not is_metric(metric) or not metric.startswith("avg_at_"):
        return None
    answers = samples_per_problem(metric)
    if answers < 2 or not len(cell.scores):
        return None
    variance = (cell.scores * (1.0 - cell.scores)).mean(axis=1) / ((answers - 1.0) * cell.scores.shape[1])
    return float(np.sqrt(variance.mean()))

"""The content of ``frontier.json``: every number of the report's figures and tables that is not a history column.

Keys, types and units: ``docs/frontier_json.md``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.findings import Analysis
from analysis.fitting.curves import AllocationCurve
from analysis.fitting.frontier import Crossover, FrontierPoint
from analysis.fitting.intervals import Interval, interval
from analysis.fitting.questions import Frontier
from analysis.fitting.records import IsotonicCurve
from analysis.fitting.verdict import LawVerdict
from analysis.report.cells import cell_records, fit_record

SCHEMA = "isocompute.frontier/2"
"""Version of the file; the number rises when a key changes its meaning or goes, not when one is added."""

Json = dict[str, Any]


def frontier_json(analysis: Analysis, diagnosis: Diagnosis, sentences: Sequence[str]) -> Json:
    """The whole file as JSON values; None where there is no number. sentences: the verdict."""
    free, *fixed = analysis.frontiers
    resampling = analysis.resampling
    return {
        "schema": SCHEMA,
        "name": analysis.tables.name,
        "metric": analysis.metric,
        "base_reward": analysis.base_reward,
        "options": asdict(analysis.options) | {"metric": analysis.metric},
        "verdict": list(sentences),
        "missing": analysis.missing,
        "resampling": {"over": list(resampling.over), "missing": list(resampling.missing)},
        "frontier": _points(free.points),
        "crossovers": [_crossover(change, diagnosis) for change in free.changes],
        "law": _law(free.law),
        "budgets": _points(analysis.budgets),
        "questions": [_question(frontier) for frontier in fixed],
        "views": _views(analysis),
        "held_out": _held_out(analysis),
        "allocations": [_allocation(curve, analysis) for curve in analysis.curves],
        "cells": cell_records(analysis, diagnosis),
        "diagnostics": _diagnostics(diagnosis),
    }


def json_bytes(content: Json) -> bytes:
    """As a file: a key a line, lists of numbers on one line."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    # Line breaks inside a text are escaped, so these can only be the indentation's.
    flat = re.sub(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]', lambda found: f"[{' '.join(found[1].split())}]", text)
    return (flat + "\n").encode()


def _question(frontier: Frontier) -> Json:
    return {
        "fixed": frontier.question.fixed,
        "value": frontier.question.value,
        "title": frontier.question.title,
        "frontier": _points(frontier.points),
        "crossovers": [_crossover(change, None) for change in frontier.changes],
        "law": _law(frontier.law),
        "law_in_steps": None if frontier.law_in_steps is None else _law(frontier.law_in_steps),
    }


def _points(points: Sequence[FrontierPoint]) -> Json:
    """As columns of one length."""
    return {
        "compute": [point.compute for point in points],
        "reward": [point.reward for point in points],
        "reward_low": [_end(point.reward_interval, 0) for point in points],
        "reward_high": [_end(point.reward_interval, 1) for point in points],
        "rollouts_per_problem": [point.rollouts_per_problem for point in points],
        "rollouts_per_problem_low": [_end(point.rollouts_per_problem_interval, 0) for point in points],
        "rollouts_per_problem_high": [_end(point.rollouts_per_problem_interval, 1) for point in points],
        "problems_per_batch": [point.problems_per_batch for point in points],
        "compared_n": [list(point.compared_n) for point in points],
        "not_worse_n": [None if p.not_worse_n is None else list(p.not_worse_n) for p in points],
    }


def _crossover(change: Crossover, diagnosis: Diagnosis | None) -> Json:
    return {
        "compute": change.compute,
        "compute_low": _end(change.compute_interval, 0),
        "compute_high": _end(change.compute_interval, 1),
        "before": change.before,
        "after": change.after,
        "problems_per_batch": change.problems_per_batch,
        "kind": change.kind,
        "epochs": None if diagnosis is None else diagnosis.epochs.get(change),
    }


def _law(law: LawVerdict) -> Json:
    return {
        "identified": law.identified,
        "plateau_identified": law.plateau_identified,
        "floor_identified": law.floor_identified,
        "reasons": list(law.reasons),
        "notes": list(law.notes),
        "text": law.text,
        "parameters": _parameters(law),
        "forms": [asdict(form) for form in law.forms],
    }


def _parameters(law: LawVerdict) -> Json | None:
    fit = law.fit
    if fit is None:
        return None

    def estimate(name: str, value: float) -> Json:
        spread = law.intervals.get(name)
        return {"value": value, "low": _end(spread, 0), "high": _end(spread, 1)}

    return {
        "axis": "log10 C" if fit.axis == "log10" else "M",
        "L": estimate("rise", fit.rise),
        "k": estimate("steepness", fit.steepness),
        "x0": estimate("midpoint", fit.midpoint),
        "b": estimate("log2_floor", fit.log2_floor),
        "L_plus_b": estimate("log2_plateau", fit.rise + fit.log2_floor),
        "plateau": fit.plateau if law.plateau_identified else None,
        "floor": fit.floor if law.floor_identified else None,
        "sse": fit.sse,
        "points": fit.points,
        "on_bound": list(fit.on_bound),
    }


def _views(analysis: Analysis) -> Json:
    views = analysis.views
    return {
        "budgets": columns(views.table),
        "law_by_record_points": _law(views.law_by_record_points),
        "record_frontier": columns(views.record_frontier),
        "law_of_record_frontier": _law(views.law_of_record_frontier),
    }


def _held_out(analysis: Analysis) -> Json | None:
    held_out = analysis.held_out
    if held_out is None:
        return None
    return {
        "fitted_to": held_out.fitted_to,
        "allocations": held_out.allocations,
        "reward_error": held_out.reward_error,
        "doublings_error": held_out.doublings_error,
        "law": _law(held_out.law),
        "budgets": columns(held_out.table),
    }


def _allocation(curve: AllocationCurve, analysis: Analysis) -> Json:
    compute = analysis.land.compute
    inside = compute[curve.fit.observes(compute)]
    spreads: list[Interval | None] = [None] * len(inside)
    if curve.replicates is not None:
        sampled = curve.predict_replicates(inside)
        spreads = [interval(row, analysis.options.confidence) for row in sampled]
    return {
        "problems_per_batch": curve.allocation.problems_per_batch,
        "rollouts_per_problem": curve.allocation.rollouts_per_problem,
        "cells": list(curve.cells),
        "seeds": list(curve.seeds),
        "fit": fit_record(curve.fit),
        "record_fit": None if curve.by_records is None else fit_record(curve.by_records),
        "curve": {
            "compute": inside.tolist(),
            "reward": curve.fit.predict(inside).tolist(),
            "reward_low": [_end(spread, 0) for spread in spreads],
            "reward_high": [_end(spread, 1) for spread in spreads],
        },
        "isotonic": _isotonic(curve.isotonic),
    }


def _isotonic(curve: IsotonicCurve) -> Json:
    """The corners of the curve: between two of them it is level or a straight line in log C."""
    rises = np.diff(curve.reward) > 0
    corner = np.r_[True, rises] | np.r_[rises, True]
    return {
        "compute": (10.0 ** curve.log10_compute[corner]).tolist(),
        "reward": curve.reward[corner].tolist(),
    }


def _diagnostics(diagnosis: Diagnosis) -> Json:
    histograms = diagnosis.histograms
    return {
        "compared_at": diagnosis.compared_at,
        "sensitivity": records(diagnosis.sensitivity),
        "best_n": records(diagnosis.best_n),
        "overfitting": records(diagnosis.overfitting),
        "interference": records(diagnosis.interference),
        "training": records(diagnosis.training),
        "probe": {
            "answers": histograms.answers,
            "problems": histograms.problems,
            "left_out": [{"cell": cell, "reason": why} for cell, why in sorted(histograms.left_out.items())],
        },
    }


def records(frame: pd.DataFrame) -> list[Json]:
    """A frame's rows, None for what is missing."""
    names = [str(name) for name in frame.columns]
    values = [_plain(frame[name]) for name in frame.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def columns(frame: pd.DataFrame) -> Json:
    """A frame's columns as lists, None for what is missing."""
    return {str(name): _plain(frame[name]) for name in frame.columns}


def _plain(values: pd.Series) -> list[Any]:
    plain = values.astype(object).where(values.notna(), None).tolist()
    return [None if isinstance(value, float) and not np.isfinite(value) else value for value in plain]


def _end(spread: Interval | None, index: int) -> float | None:
    return None if spread is None else spread[index]

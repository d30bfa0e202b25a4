"""A run's report: ``frontier.json``, the two figures as SVG and PDF, and a single-file HTML page.

The same run gives the same bytes.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis.curves import usable_rows
from analysis.figures import frontier_figure, inline_svg, n_star_figure, pdf_bytes, svg_bytes
from analysis.findings import Analysis, analyse
from analysis.frontier import frontier_table
from analysis.tables import metric_label, read_base, read_history, read_reasons, read_states

SCHEMA = "isocompute.frontier/1"
"""Version of ``frontier.json``; the number rises when a key changes its meaning or goes."""


@dataclass(frozen=True)
class Report:
    """What ``write_report`` wrote, and what a command line prints of it."""

    frontier: pd.DataFrame
    """The frontier at a few budgets; columns as in ``frontier_table``."""
    verdict: str
    missing: list[str]
    paths: dict[str, Path]
    """By file name: frontier.json, frontier.svg, frontier.pdf, n_star.svg, n_star.pdf, report.html."""
    analysis: Analysis


def write_report(run_dir: Path | str, out_dir: Path | str | None = None, metric: str | None = None) -> Report:
    """Analyse a run folder and write its report to ``out_dir`` (default: ``<run>/report``).

    metric: a validation metric of the history; default: the headline avg_at_K. Raises UserError for an
    unreadable run folder or an unknown metric; a grid with holes is reported as such.
    """
    history, base = read_history(run_dir), read_base(run_dir)
    analysis = analyse(history, base, read_states(run_dir), read_reasons(run_dir), metric)
    name = Path(run_dir).resolve().name
    target = Path(out_dir) if out_dir is not None else Path(run_dir) / "report"

    reward_figure = frontier_figure(
        history, analysis.curves, analysis.points, analysis.metric, analysis.base_reward
    )
    grid_n = history["rollouts_per_problem"].unique().tolist()
    n_figure = n_star_figure(analysis.points, analysis.changes, analysis.verdict, grid_n)
    content = frontier_json(analysis, name)
    svgs = {"frontier": svg_bytes(reward_figure), "n_star": svg_bytes(n_figure)}
    files = {
        "frontier.json": (json.dumps(content, indent=1, allow_nan=False) + "\n").encode(),
        "frontier.svg": svgs["frontier"],
        "frontier.pdf": pdf_bytes(reward_figure),
        "n_star.svg": svgs["n_star"],
        "n_star.pdf": pdf_bytes(n_figure),
        "report.html": _html(analysis, content, svgs).encode(),
    }
    target.mkdir(parents=True, exist_ok=True)
    for file_name, data in files.items():
        _replace(target / file_name, data)
    return Report(
        frontier=frontier_table(analysis.budgets),
        verdict=" ".join(analysis.sentences),
        missing=analysis.missing,
        paths={file_name: target / file_name for file_name in files},
        analysis=analysis,
    )


def frontier_json(analysis: Analysis, run: str) -> dict[str, Any]:
    """The content of ``frontier.json``: every number that redraws the figures; null where there is none.

    Keys: schema, run, metric, base_reward, cells (points, final score, state, fit or the reason why not),
    frontier, budgets, crossovers, law (parameters null when not identified), missing.
    """
    verdict = analysis.verdict
    law: dict[str, Any] | None = None
    if verdict.fit is not None:
        fit = verdict.fit
        law = {
            "L": fit.rise,
            "k": fit.steepness,
            "log10_C0": fit.log10_midpoint,
            "b": fit.log2_floor,
            "plateau": fit.plateau if verdict.plateau_identified else None,
            "floor": fit.floor if verdict.floor_identified else None,
            "sse": fit.sse,
            "points": fit.points,
            "on_bound": list(fit.on_bound),
        }
    return {
        "schema": SCHEMA,
        "run": run,
        "metric": analysis.metric,
        "base_reward": analysis.base_reward,
        "cells": _cells(analysis),
        "frontier": [asdict(point) for point in analysis.points],
        "budgets": frontier_table(analysis.budgets).to_dict(orient="records"),
        "crossovers": [asdict(change) for change in analysis.changes],
        "law": {
            "identified": verdict.identified,
            "plateau_identified": verdict.plateau_identified,
            "floor_identified": verdict.floor_identified,
            "parameters": law,
            "reasons": list(verdict.reasons),
            "notes": list(verdict.notes),
            "text": verdict.text,
        },
        "missing": analysis.missing,
    }


def _cells(analysis: Analysis) -> list[dict[str, Any]]:
    fits = {curve.cell: curve.fit for curve in analysis.curves}
    groups = {str(cell): rows for cell, rows in analysis.history.groupby("cell", sort=True)}
    ordered = sorted(groups, key=lambda cell: (*_shape(groups[cell]).values(), cell))
    ordered += sorted(set(analysis.states) - set(groups))
    cells = []
    for cell in ordered:
        rows = usable_rows(groups[cell], analysis.metric) if cell in groups else None
        points = []
        if rows is not None:
            pairs = zip(rows["compute_rollouts"], rows[analysis.metric], strict=True)
            points = [{"compute_rollouts": int(c), "reward": float(r)} for c, r in pairs]
        fit = fits.get(cell)
        remarks = [analysis.unfitted[cell]] if cell in analysis.unfitted else []
        remarks += [analysis.reasons[cell]] if cell in analysis.reasons else []
        remarks += [] if fit is None else list(fit.on_bound)
        remarks += ["the fit did not converge"] if fit is not None and not fit.converged else []
        shape = _shape(groups[cell]) if cell in groups else dict.fromkeys(_SHAPE)
        cells.append(
            {
                "cell": cell,
                **shape,
                "state": analysis.states.get(cell, "unknown"),
                "points": points,
                "final": points[-1] if points else None,
                "fit": None if fit is None else asdict(fit),
                "not_fitted": analysis.unfitted.get(cell),
                "remarks": remarks,
            }
        )
    return cells


_SHAPE = ("rollouts_per_problem", "problems_per_batch", "seed")


def _shape(rows: pd.DataFrame) -> dict[str, int]:
    return {column: int(rows[column].iloc[0]) for column in _SHAPE}


def _html(analysis: Analysis, content: dict[str, Any], svgs: dict[str, bytes]) -> str:
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("report.html.j2").render(
        run=content["run"],
        metric=metric_label(analysis.metric),
        base=analysis.base_reward,
        verdict=analysis.sentences,
        missing=analysis.missing,
        cells=content["cells"],
        budgets=content["budgets"],
        frontier_svg=Markup(
            inline_svg(svgs["frontier"], "f", "validation reward against compute, with the frontier")
        ),
        n_star_svg=Markup(
            inline_svg(svgs["n_star"], "n", "compute-optimal rollouts per problem against compute")
        ),
    )


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)

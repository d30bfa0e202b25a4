"""The report's files: ``frontier.json``, every figure as SVG and PDF, and a single-file page.

The same tables and options give the same bytes.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.diagnostics.diagnosis import diagnose
from analysis.figures import FIGURES, inline_svg, pdf_bytes, svg_bytes
from analysis.findings import Analysis, analyse
from analysis.fitting.frontier import frontier_table
from analysis.options import FitOptions
from analysis.report.cells import cell_records
from analysis.report.frontier_json import frontier_json, json_bytes
from analysis.report.page import Drawing, html_page
from analysis.report.sections import sections
from analysis.report.words import verdict
from analysis.tables import GridTables


@dataclass(frozen=True)
class Report:
    """What ``write_report`` wrote, and what a command line prints of it."""

    frontier: pd.DataFrame
    """The frontier at a few budgets; columns as in ``frontier_table``."""
    verdict: list[str]
    """Sentences, each of which stands alone."""
    missing: list[str]
    """The holes, one sentence for each cell."""
    paths: dict[str, Path]
    """By file name: frontier.json, report.html, and <figure>.svg and .pdf of every figure that could be drawn."""
    analysis: Analysis


def write_report(tables: GridTables, out_dir: Path, options: FitOptions | None = None) -> Report:
    """Analyse a setting's tables and write its report to ``out_dir``, which is made where it is missing.

    Raises UserError for a metric that the tables do not have; a grid with holes is reported as such.
    """
    analysis = analyse(tables, options)
    diagnosis = diagnose(analysis)
    topics = verdict(analysis, diagnosis)
    sentences = [sentence for topic in topics.values() for sentence in topic]
    files = {"frontier.json": json_bytes(frontier_json(analysis, diagnosis, sentences))}
    drawings = {}
    for kind in FIGURES:
        figure, svg = kind.draw(analysis, diagnosis), None
        if figure is not None:
            files[f"{kind.key}.svg"], files[f"{kind.key}.pdf"] = svg_bytes(figure), pdf_bytes(figure)
            svg = inline_svg(files[f"{kind.key}.svg"], kind.key, kind.title)
        drawings[kind.key] = Drawing(kind.title, kind.caption, svg, kind.needs)
    contents = sections(analysis, diagnosis, cell_records(analysis, diagnosis))
    files["report.html"] = html_page(analysis, topics, contents, drawings).encode()
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _replace(out_dir / name, data)
    for kind in FIGURES:  # of an earlier report, when there was more to draw
        for name in (f"{kind.key}.svg", f"{kind.key}.pdf"):
            if name not in files:
                (out_dir / name).unlink(missing_ok=True)
    return Report(
        frontier=frontier_table(analysis.budgets),
        verdict=sentences,
        missing=analysis.missing,
        paths={name: out_dir / name for name in files},
        analysis=analysis,
    )


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)

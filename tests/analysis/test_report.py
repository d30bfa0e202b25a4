"""The report's files: what is written, what the page holds, and that holes never stop it."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.figures import FIGURES
from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from analysis.reading.sources import read_run, tables_from_frame
from analysis.report import Report, frontier_json, verdict, write_report
from analysis.report.blocks import COLLAPSED_ROWS, Picture, Table
from analysis.report.cells import cell_records
from analysis.report.diagnosis import diagnose
from analysis.report.frontier_json import json_bytes
from analysis.report.page import Drawing, html_page, symbols
from analysis.report.sections import sections
from analysis.synthetic import ONE_N, SyntheticGrid, synthetic_grid
from analysis.tables import GridTables
from grids.errors import UserError
from tests.analysis.small_run import CELLS, set_state, write_small_run

FEW = FitOptions(replicates=20)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run folder, not to be changed."""
    return write_small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def report(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(read_run(run), tmp_path_factory.mktemp("report"), FEW)


def page_of(tables: GridTables, options: FitOptions = FEW, draws: bool = True) -> tuple[Analysis, str]:
    """All that a report computes and (if it draws) draws, without the slow writing of images."""
    analysis = analyse(tables, options)
    diagnosis = diagnose(analysis)
    topics = verdict(analysis, diagnosis)
    drawings = {
        kind.key: Drawing(
            kind.title, kind.caption, "<svg/>" if draws and kind.draw(analysis) else None, kind.needs
        )
        for kind in FIGURES
    }
    json_bytes(frontier_json(analysis, diagnosis, [words for topic in topics.values() for words in topic]))
    contents = sections(analysis, diagnosis, cell_records(analysis, diagnosis))
    return analysis, html_page(analysis, topics, contents, drawings)


def test_a_report_is_a_page_a_json_file_and_two_files_for_each_figure(report: Report) -> None:
    folder = report.paths["report.html"].parent
    assert {path.name for path in folder.iterdir()} == set(report.paths)
    assert {"frontier.json", "frontier.svg", "frontier.pdf", "n_star.svg", "n_star.pdf"} <= set(report.paths)
    assert all(path == folder / name and path.stat().st_size > 0 for name, path in report.paths.items())
    assert report.frontier["compute"].tolist() == [1024 * 2**i for i in range(7)]
    assert report.missing == []


def test_the_page_is_one_file_that_asks_for_nothing(report: Report) -> None:
    html = report.paths["report.html"].read_text()
    assert "http" not in html
    assert not re.search(r"\bsrc\s*=|<link|<script|@import|url\((?!#)", html)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="([^"]+)"', html)) | set(re.findall(r"url\(([^)]+)\)", html))
    assert used <= {f"#{name}" for name in ids}
    assert html.count("<svg") == sum(name.endswith(".svg") for name in report.paths)


def test_the_page_says_the_verdict_first_and_shows_every_section(report: Report) -> None:
    html = report.paths["report.html"].read_text()
    places = [html.index(symbols(sentence)) for sentence in report.verdict]
    places += [
        html.index(f'<h2 id="{name}"') for name in ("frontier", "law", "questions", "views", "held-out")
    ]
    places += [html.index(f'<h2 id="{name}"') for name in ("sensitivity", "diagnostics", "cells", "reading")]
    assert places == sorted(places)


def test_every_kind_of_figure_has_one_place_in_the_report(report: Report) -> None:
    diagnosis = diagnose(report.analysis)
    blocks = [block for section in sections(report.analysis, diagnosis, []) for block in section.blocks]
    assert sorted(block.key for block in blocks if isinstance(block, Picture)) == sorted(
        k.key for k in FIGURES
    )


def test_the_budget_table_shows_bounds_that_the_json_holds_too(report: Report) -> None:
    html = report.paths["report.html"].read_text()
    last = report.analysis.budgets[-1]
    low, high = last.reward_interval or (None, None)
    assert f"<td>{last.reward:.3f} ({low:.3f} to {high:.3f})</td>" in html


def test_a_long_table_is_folded_and_a_short_one_is_not() -> None:
    row = ("a", "b")
    assert not Table("t", row, [row] * COLLAPSED_ROWS).is_long
    assert Table("t", row, [row] * (COLLAPSED_ROWS + 1)).is_long


def test_indices_are_set_and_markup_is_not_taken_over() -> None:
    assert (
        symbols("B_p of log10 C0 <b> bp16")
        == "B<sub>p</sub> of log<sub>10</sub> C<sub>0</sub> &lt;b&gt; bp16"
    )


def test_what_a_source_says_is_never_markup(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    set_state(folder, "bp16-n4-s0", "failed", 7, "out of memory <script>")
    _, html = page_of(read_run(folder))
    assert "failed (out of memory &lt;script&gt;)" in html
    assert "<script" not in html


def _damaged(run: Path) -> Iterator[tuple[str, str]]:
    """Damage the run in all the ways that a grid can be unfinished; yields the cell and words that must name it."""
    for cell in CELLS:
        folder = run / "cells" / cell
        saved = shutil.copytree(folder, run.parent / "saved")
        shutil.rmtree(folder)
        yield cell, "missing: the grid has this cell, the run has not"
        shutil.copytree(saved, folder)
        set_state(run, cell, "failed", 7, "worker lost")
        yield cell, "failed (worker lost)"
        shutil.rmtree(folder)
        shutil.move(saved, folder)
    path = run / "cells" / "bp16-n16-s0" / "history.jsonl"
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, len(whole) // 6):
        path.write_bytes(whole[:size])
        yield "bp16-n16-s0", f"history holds {whole[:size].count(10)} of 7 committed rows"
    path.write_bytes(whole)


def test_a_report_names_every_hole_and_nothing_raises(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for cell, words in _damaged(folder):
        analysis, html = page_of(read_run(folder), draws=words[0] != "h")
        (hole,) = analysis.missing
        assert hole.startswith(f"{cell}: ")
        assert words in hole
        assert hole in html
    assert analyse(read_run(folder), FEW).missing == []


def test_a_run_without_any_evaluation_gets_a_report_that_says_so(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "base.json").unlink()
    for cell in CELLS:
        (folder / "cells" / cell / "history.jsonl").write_text("")
        set_state(folder, cell, "pending", 0)
    out = folder / "report"
    out.mkdir()
    for name in ("frontier.svg", "frontier.pdf", "notes.svg"):
        (out / name).write_text("of an earlier report")
    report = write_report(read_run(folder), out, FEW)
    assert report.verdict == [
        "There is no frontier yet: no allocation could be fitted, because a curve needs at least 4 evaluations at "
        "different C."
    ]
    assert [hole.split(":")[0] for hole in report.missing] == sorted(CELLS)
    assert report.frontier.empty
    assert "frontier.svg" not in report.paths
    assert {path.name for path in out.iterdir()} == {*report.paths, "notes.svg"}


@pytest.mark.parametrize("rows", [1, 3])
def test_cells_with_too_few_evaluations_for_a_curve_are_still_listed(tmp_path: Path, rows: int) -> None:
    analysis, html = page_of(read_run(write_small_run(tmp_path / "run", rows)))
    assert len(analysis.missing) == 3
    assert f"{rows} usable points of avg_at_4; a curve needs at least 4" in html
    assert html[html.index('<h2 id="cells"') :].count("<td>bp16-n") == 3


def test_one_cell_alone_gives_its_curve_and_no_comparison(run: Path) -> None:
    whole = read_run(run)
    alone = whole.history[whole.history["cell"] == "bp16-n4-s0"]
    tables = replace(whole, history=alone, states={}, complaints={}, spec=None)
    analysis, html = page_of(tables)
    assert "Every fitted cell has n = 4, so this grid cannot say which n is best." in html
    assert len(analysis.curves) == 1


SMALL = SyntheticGrid(
    law=None,
    problems_per_batch=(32, 64),
    rollouts_per_problem=(8, 32, 128),
    seeds=(0, 1),
    validation_problems=50,
)


@pytest.mark.parametrize(
    ("metric", "compute"),
    [("worst_at_4", "rollouts"), ("best_at_4", "tokens"), ("avg_at_4", "accelerator_seconds")],
)
def test_every_metric_and_compute_unit_gives_a_report(metric: str, compute: str) -> None:
    tables = synthetic_grid(SMALL, np.random.default_rng(0))
    _, html = page_of(tables, FitOptions(metric, compute, replicates=10))  # type: ignore[arg-type]
    assert f"Validation {metric.replace('_at_', '@')} of 12 cells" in html
    assert f"C ({compute.replace('_', '-')})" in html


def test_one_n_alone_and_no_intervals_give_a_report() -> None:
    tables = synthetic_grid(replace(ONE_N, seeds=(0,), validation_problems=50), np.random.default_rng(0))
    analysis, html = page_of(tables, FitOptions(replicates=0))
    assert "no bootstrap replicates were asked for" in html
    assert "Every fitted cell has n = 64" in html
    assert analysis.resampling.over == ()


BARE = [
    {"problems_per_batch": 8, "rollouts_per_problem": n, "step": step, "avg_at_1": step / (n + step)}
    for n in (2, 4)
    for step in (1, 2, 4, 8, 16)
]


def test_a_bare_table_of_another_trainer_gives_the_same_bytes_every_time(tmp_path: Path) -> None:
    reports = [
        write_report(tables_from_frame(pd.DataFrame(BARE)), tmp_path / name, FEW) for name in ("a", "b/c")
    ]
    html = reports[0].paths["report.html"].read_text()
    assert "There are no intervals: one seed per allocation and no per-problem scores" in html
    assert "Training, first to last evaluated row" not in html
    assert reports[0].paths.keys() == reports[1].paths.keys()
    for name, path in reports[0].paths.items():
        assert path.read_bytes() == reports[1].paths[name].read_bytes(), name


def test_intervals_are_the_same_every_time(run: Path) -> None:
    assert page_of(read_run(run), draws=False)[1] == page_of(read_run(run), draws=False)[1]


def test_an_unknown_metric_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'best_at_8' is not in the table"):
        write_report(read_run(run), tmp_path / "report", FitOptions("best_at_8"))
    assert not (tmp_path / "report").exists()

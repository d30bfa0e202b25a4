"""The report's files: what is written, what the page holds, and that holes never stop it."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markupsafe import escape

from analysis.diagnostics.diagnosis import diagnose
from analysis.figures import FIGURES
from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from analysis.reading.sources import read_run, tables_from_frame
from analysis.report import Report, frontier_json, verdict, write_report
from analysis.report.blocks import COLLAPSED_ROWS, Picture, Table
from analysis.report.cells import cell_records
from analysis.report.frontier_json import json_bytes
from analysis.report.page import Drawing, html_page, symbols
from analysis.report.sections import sections
from analysis.synthetic import ONE_N, SyntheticGrid, synthetic_grid
from analysis.tables import GridTables
from grids.errors import UserError
from grids.spec import EvaluationSpec
from tests.analysis.small_run import CELLS, set_state, write_small_run

FEW = FitOptions(replicates=20)
PHASES = pd.DataFrame(
    [
        {"start": "e000001", "member": member, "kind": kind, "cell": "bp16-n4-s0", "started_at": 100.0}
        | {"busy_seconds": busy, "waited_seconds": 0.0, "failed": False}
        for member, kind, busy in (("sampler 0", "sampling", 3.0), ("learner 0", "learning", 4.0))
    ]
)
"""A record of the pools: one phase each."""


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
            kind.title,
            kind.caption,
            "<svg/>" if draws and kind.draw(analysis, diagnosis) else None,
            kind.needs,
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
    analysis = replace(report.analysis, tables=replace(report.analysis.tables, phases=PHASES))
    found = sections(analysis, diagnose(analysis), [])
    blocks = [block for section in found for block in section.blocks]
    assert sorted(block.key for block in blocks if isinstance(block, Picture)) == sorted(
        k.key for k in FIGURES
    )


def test_the_pools_have_a_section_where_the_run_has_a_record_and_nothing_else_changes(
    run: Path, report: Report, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "phases").mkdir()
    lines = [json.dumps(row) for row in PHASES.drop(columns="start").to_dict("records")]
    (folder / "phases" / "e000001-000001.jsonl").write_text("\n".join(lines))
    tables = replace(read_run(folder), name=report.analysis.tables.name)
    with_record = write_report(tables, folder / "report", FEW)
    assert {*with_record.paths} - {*report.paths} == {"pools.svg", "pools.pdf"}
    pages = [found.paths["report.html"].read_text() for found in (report, with_record)]
    section = re.compile(r'<h2 id="pools".*?(?=<h2 id="cells")', flags=re.DOTALL)
    assert "samplers 75%, learners 100%" in section.findall(pages[1])[0]
    link = '<a href="#pools">The pools at work</a> '
    assert pages[1].count(link) == 1
    assert section.sub("", pages[1]).replace(link, "") == pages[0]
    written = [found.paths["frontier.json"].read_bytes() for found in (report, with_record)]
    assert written[0] == written[1]


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


def _damaged(run: Path) -> Iterator[tuple[str, str]]:
    """Damage the run in all the ways that a grid can be unfinished; yields the cell and words that must name it."""
    for cell in CELLS:
        folder = run / "cells" / cell
        saved = shutil.copytree(folder, run.parent / "saved")
        shutil.rmtree(folder)
        yield cell, "missing: the grid has this cell, the run has not"
        shutil.copytree(saved, folder)
        for state, reason in (("failed", "worker lost"), ("cancelled", "by hand")):
            set_state(run, cell, state, 7, reason)
            yield cell, f"{state} ({reason})"
        shutil.rmtree(folder)
        shutil.move(saved, folder)
    for size in range(0, len(_history(run, "bp16-n16-s0")) - 1, len(_history(run, "bp16-n16-s0")) // 6):
        whole = _cut(run, "bp16-n16-s0", size)
        yield "bp16-n16-s0", f"history holds {whole[:size].count(10)} of 7 committed rows"
        _history_path(run, "bp16-n16-s0").write_bytes(whole)


def _history_path(run: Path, cell: str) -> Path:
    return run / "cells" / cell / "history.jsonl"


def _history(run: Path, cell: str) -> bytes:
    return _history_path(run, cell).read_bytes()


def _cut(run: Path, cell: str, size: int) -> bytes:
    """Cut a history after so many bytes; what it was before."""
    whole = _history(run, cell)
    _history_path(run, cell).write_bytes(whole[:size])
    return whole


def test_every_kind_of_hole_is_named_and_nothing_raises(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for cell, words in _damaged(folder):
        (hole,) = analyse(read_run(folder), FEW).missing
        assert hole.startswith(f"{cell}: ")
        assert words in hole
    assert analyse(read_run(folder), FEW).missing == []


@pytest.mark.parametrize(
    "lost_rows", [{"bp16-n64-s0": None}, {"bp16-n16-s0": 0, "bp16-n64-s0": 5}], ids=["cell", "rows"]
)
def test_the_page_of_a_grid_with_holes_names_each_and_nothing_raises(
    run: Path, tmp_path: Path, lost_rows: dict[str, int | None]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    set_state(folder, "bp16-n4-s0", "failed", 7, "out of memory <script>")
    for cell, rows in lost_rows.items():
        if rows is None:
            shutil.rmtree(folder / "cells" / cell)
        else:
            row = len(_history(folder, cell).splitlines()[0])
            _cut(folder, cell, rows * row + row // 2)
    analysis, html = page_of(read_run(folder))
    assert [hole.split(":")[0] for hole in analysis.missing] == sorted({"bp16-n4-s0", *lost_rows})
    assert all(str(escape(hole)) in html for hole in analysis.missing)
    assert "failed (out of memory &lt;script&gt;)" in html
    assert "<script" not in html


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


def test_cells_with_too_few_evaluations_for_a_curve_are_still_listed(tmp_path: Path) -> None:
    folder = write_small_run(tmp_path / "run", rows=3)
    for cell in ("bp16-n4-s0", "bp16-n64-s0"):
        (path := _history_path(folder, cell)).write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        set_state(folder, cell, "running", 1)
    analysis, html = page_of(read_run(folder))
    assert len(analysis.missing) == 3
    for rows in (1, 3):
        assert f"{rows} usable points of avg_at_4; a curve needs at least 4" in html
    assert html[html.index('<h2 id="cells"') :].count("<td>bp16-n") == 3


def test_the_table_of_cells_says_which_are_not_bit_for_bit_an_undisturbed_run(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path = folder / "cells" / "bp16-n16-s0" / "state.json"
    record = json.loads(path.read_text()) | {"version": 2, "deviations": ["from step 3 on: ranks 1 -> 2"]}
    path.write_text(json.dumps(record))
    analysis, html = page_of(read_run(folder), draws=False)
    assert analysis.missing == []
    table = html[html.index('<h2 id="cells"') :]
    (row,) = re.findall(r"<tr>(?:(?!</tr>).)*ranks 1 -&gt; 2.*?</tr>", table, flags=re.DOTALL)
    assert "bp16-n16-s0" in row
    assert "not bit for bit an undisturbed run: from step 3 on: ranks 1 -&gt; 2" in row


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
    rollouts_per_problem=(8, 128),
    seeds=(0, 1),
    evaluation=EvaluationSpec(first_mark=2**15, marks_per_doubling=1),
    validation_problems=50,
)


@pytest.mark.parametrize(
    ("metric", "compute"),
    [("worst_at_4", "rollouts"), ("best_at_4", "tokens"), ("avg_at_4", "accelerator_seconds")],
)
def test_every_metric_and_compute_unit_gives_a_report(metric: str, compute: str) -> None:
    tables = synthetic_grid(SMALL, np.random.default_rng(0))
    _, html = page_of(tables, FitOptions(metric, compute, replicates=10))  # type: ignore[arg-type]
    assert f"Validation {metric.replace('_at_', '@')} of 8 cells" in html
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


def test_a_bare_table_of_another_trainer_gives_a_report_the_same_every_time() -> None:
    tables = tables_from_frame(pd.DataFrame(BARE))
    _, html = page_of(tables)
    assert "There are no intervals: one seed per allocation and no per-problem scores" in html
    assert "Training, first to last evaluated row" not in html
    assert html == page_of(tables)[1]


def test_intervals_are_the_same_every_time(run: Path, report: Report) -> None:
    again = analyse(read_run(run), FEW)
    written = json_bytes(frontier_json(again, diagnose(again), report.verdict))
    assert written == report.paths["frontier.json"].read_bytes()


def test_an_unknown_metric_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'best_at_8' is not in the table"):
        write_report(read_run(run), tmp_path / "report", FitOptions("best_at_8"))
    assert not (tmp_path / "report").exists()

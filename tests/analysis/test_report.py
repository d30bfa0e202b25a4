"""The report of a run folder."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.figures import inline_svg
from analysis.findings import short_count
from analysis.report import write_report
from grids.errors import UserError

MakeRun = Callable[..., Path]

# R0 = 0.3 and s = 1: n = 4 (gain 0.3, Cmid 2000) and n = 16 (gain 0.4, Cmid 5000) cross at
# (0.4 * 2000 - 0.3 * 5000) / (0.3 - 0.4) = 7000; n = 64 stays below both.
CELLS = [
    (16, 4, (0.3, 0.6, 2000.0, 1.0)),
    (16, 16, (0.3, 0.7, 5000.0, 1.0)),
    (16, 64, (0.3, 0.6, 20_000.0, 1.0)),
]
FILES = ["frontier.json", "frontier.pdf", "frontier.svg", "n_star.pdf", "n_star.svg", "report.html"]


def load(run: Path) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads((run / "report" / "frontier.json").read_text(), parse_constant=refuse)


def test_a_finished_grid_gives_the_files_the_crossing_and_the_verdict(make_run: MakeRun) -> None:
    run = make_run(CELLS)
    report = write_report(run)
    assert sorted(path.name for path in (run / "report").iterdir()) == FILES
    assert all(report.paths[name] == run / "report" / name for name in FILES)
    (change,) = report.analysis.changes
    assert change.compute_rollouts == pytest.approx(7000, rel=0.02)
    assert "from 4 to 16 at C = 7" in report.verdict
    assert "The law is not identified: the fitted cells hold 3 values of n (4, 16, 64)" in report.verdict
    assert report.missing == []
    by_budget = report.frontier.set_index("compute_rollouts")
    assert by_budget.loc[4096, "rollouts_per_problem"] == 4
    assert by_budget.loc[32_768, "rollouts_per_problem"] == 16
    assert by_budget.loc[32_768, "reward"] == pytest.approx(0.3 + 0.4 / (1 + 5000 / 32_768), abs=2e-3)


def test_frontier_json_holds_every_number_that_redraws_the_figures(make_run: MakeRun) -> None:
    run = make_run(CELLS)
    write_report(run)
    content = load(run)
    assert content["schema"] == "isocompute.frontier/1"
    assert (content["run"], content["metric"], content["base_reward"]) == ("grid", "avg_at_4", 0.3)
    assert content["law"]["parameters"] is None
    assert [cell["cell"] for cell in content["cells"]] == ["bp16-n4-s0", "bp16-n16-s0", "bp16-n64-s0"]
    first = content["cells"][0]
    assert first["points"][0]["compute_rollouts"] == 1024
    assert first["final"] == first["points"][-1]
    assert first["fit"]["midpoint"] == pytest.approx(2000, rel=0.05)
    assert {"compute_rollouts", "reward", "rollouts_per_problem", "problems_per_batch"} <= set(
        content["frontier"][0]
    )


def test_six_values_of_n_with_a_rising_optimum_identify_the_law(make_run: MakeRun) -> None:
    # Each next n has a higher ceiling and a later midpoint; the largest never leads within the budget.
    shapes = {
        8: (0.5, 2e3),
        16: (0.58, 5e3),
        32: (0.65, 1.2e4),
        64: (0.71, 2.6e4),
        128: (0.74, 4.2e4),
        256: (0.7, 9e4),
    }
    run = make_run([(8, n, (0.3, a, mid, 1.0)) for n, (a, mid) in shapes.items()], budget=16_000_000)
    report = write_report(run)
    assert [(c.before, c.after) for c in report.analysis.changes] == [(8, 16), (16, 32), (32, 64), (64, 128)]
    law = load(run)["law"]
    assert law["identified"]
    assert law["plateau_identified"]
    assert law["parameters"]["plateau"] == pytest.approx(128, rel=0.25)
    assert law["parameters"]["floor"] is None  # it rests on the smallest n


def test_a_half_finished_grid_names_its_holes(make_run: MakeRun) -> None:
    run = make_run(CELLS)
    failed = run / "cells" / "bp16-n64-s0"
    (failed / "state.json").write_text(json.dumps({"state": "failed", "reason": "out of memory <script>"}))
    lines = (failed / "history.jsonl").read_text().splitlines(keepends=True)
    (failed / "history.jsonl").write_text("".join(lines[:2]) + '{"cell": "bp16')
    waiting = run / "cells" / "bp16-n256-s0"
    waiting.mkdir()
    (waiting / "state.json").write_text('{"state": "pending"}')

    report = write_report(run)
    assert report.missing == [
        "bp16-n256-s0: pending; not fitted: no evaluation yet",
        "bp16-n64-s0: failed (out of memory <script>); not fitted: "
        "2 usable points of avg_at_4; a curve needs at least 4",
    ]
    html = report.paths["report.html"].read_text()
    assert "bp16-n256-s0: pending" in html
    assert "out of memory &lt;script&gt;" in html
    assert "<script" not in html
    cells = {cell["cell"]: cell for cell in load(run)["cells"]}
    assert cells["bp16-n64-s0"]["fit"] is None
    assert len(cells["bp16-n64-s0"]["points"]) == 2
    assert cells["bp16-n256-s0"]["final"] is None


@pytest.mark.parametrize("budget", [0, 2000])
def test_a_grid_without_a_fit_still_gets_a_report_that_says_why(make_run: MakeRun, budget: int) -> None:
    run = make_run(CELLS, budget=budget)
    report = write_report(run)
    assert "no cell could be fitted" in report.verdict
    assert len(report.missing) == 3
    assert len(report.frontier) == 0
    assert load(run)["frontier"] == []
    assert "no cell could be fitted" in report.paths["report.html"].read_text()


def test_a_run_without_cells_gets_a_report(tmp_path: Path) -> None:
    report = write_report(tmp_path)
    assert "no cell could be fitted" in report.verdict
    assert "The run holds no cells yet" in report.paths["report.html"].read_text()


def test_a_score_that_is_not_finite_never_reaches_the_json(make_run: MakeRun) -> None:
    run = make_run(CELLS)
    history = run / "cells" / "bp16-n4-s0" / "history.jsonl"
    history.write_text(re.sub(r'"avg_at_4": [0-9.]+', '"avg_at_4": NaN', history.read_text(), count=1))
    (run / "base.json").write_text('{"avg_at_4": NaN}')
    write_report(run)
    content = load(run)
    assert content["base_reward"] is None
    assert content["cells"][0]["points"][0]["compute_rollouts"] == 2048


def test_the_page_is_one_file_that_asks_for_nothing(make_run: MakeRun) -> None:
    html = write_report(make_run(CELLS)).paths["report.html"].read_text()
    assert "http" not in html
    assert not re.search(r"\bsrc\s*=|<link|<script|@import|url\((?!#)", html)
    assert set(re.findall(r'href="(.)', html)) == {"#"}
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html))
    assert used <= set(ids)
    assert html.count("<svg") == 2


def test_the_same_run_gives_the_same_bytes(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(CELLS)
    write_report(run, tmp_path / "first")
    write_report(run, tmp_path / "second")
    for name in FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_another_metric_is_taken_on_request_and_an_unknown_one_is_refused(make_run: MakeRun) -> None:
    run = make_run(CELLS)
    report = write_report(run, metric="best_at_4")
    assert report.analysis.metric == "best_at_4"
    assert report.analysis.base_reward == 0.5
    assert report.frontier["reward"].iloc[0] == pytest.approx(0.5 + 0.3 / (1 + 2000 / 1024), abs=0.02)
    with pytest.raises(
        UserError, match="'best_at_8' is not in the history; choose one of avg_at_4, best_at_4"
    ):
        write_report(run, metric="best_at_8")


def test_an_inlined_figure_keeps_its_references_together() -> None:
    svg = (
        b'<?xml version="1.0"?>\n<svg width="9pt" height="9pt" xmlns="http://www.w3.org/2000/svg"><metadata>x</metadata>'
        b'<path id="a"/><use xlink:href="#a" clip-path="url(#a)"/></svg>'
    )
    assert inline_svg(svg, "p", "t") == (
        '<svg role="img" aria-label="t"><path id="p-a"/><use xlink:href="#p-a" clip-path="url(#p-a)"/></svg>'
    )


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950"), (1500, "1.5k"), (32_768, "32.8k"), (999_999, "1M"), (2.66e6, "2.66M")]
)
def test_counts_are_short(value: float, text: str) -> None:
    assert short_count(value) == text

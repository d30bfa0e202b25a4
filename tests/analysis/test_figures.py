"""What the figures show: the analysis' own numbers, with words where something is missing."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.diagnostics.diagnosis import Diagnosis, diagnose
from analysis.figures import FIGURES, inline_svg, pdf_bytes, svg_bytes
from analysis.figures.style import STYLE
from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from analysis.synthetic import SyntheticGrid, SyntheticLaw, true_grid
from tests.analysis.conftest import cell_rows, sigmoid, tables_of

EARLY = (0.3, 0.5, 3000.0, 2.0)
LATE = (0.3, 0.7, 20000.0, 2.0)
BASE = {"compute_rollouts": 0, "avg_at_4": 0.3}
DRAW: dict[str, Callable[[Analysis, Diagnosis], Figure | None]] = {kind.key: kind.draw for kind in FIGURES}


def analysed(*cells: pd.DataFrame, base: dict[str, Any] | None = BASE, **options: Any) -> Analysis:
    return analyse(tables_of(*cells, base=base), FitOptions(**({"replicates": 0} | options)))


def drawn_or_none(key: str, analysis: Analysis) -> Figure | None:
    return DRAW[key](analysis, diagnose(analysis))


def drawn(key: str, analysis: Analysis) -> Figure:
    figure = drawn_or_none(key, analysis)
    assert figure is not None
    return figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def values(line: Any) -> list[float]:
    return [float(value) for value in line.get_ydata()]


def places(line: Any) -> list[float]:
    return [float(value) for value in line.get_xdata()]


@pytest.fixture(scope="module")
def pair() -> Analysis:
    """n = 4 leads early, n = 16 late; without noise."""
    return analysed(cell_rows(4, EARLY), cell_rows(16, LATE))


@pytest.fixture(scope="module")
def noisy() -> Analysis:
    """Every column there is, two B_p, three n, two seeds; the cells of n = 4 overfit."""
    draw = np.random.default_rng(0)
    cells = []
    for problems in (16, 32):
        for n, shape in ((4, EARLY), (8, LATE), (16, LATE)):
            for seed in (0, 1):
                cell = cell_rows(n, shape, problems, seed, draw=draw)
                if n == 4:
                    fallen = [right.copy() for right in cell["eval_right"]]
                    for right in fallen[-6:]:
                        right[:40] = 0
                    cell["eval_right"] = fallen
                    cell["avg_at_4"] = [right.mean() / 4 for right in fallen]
                probe = draw.binomial(8, 0.5, (len(cell), 32))
                cell["train_probe_avg_at_8"], cell["train_probe_right"] = probe.mean(axis=1) / 8, list(probe)
                cells.append(cell.assign(zero_variance_right=0.1 * (1 + seed), entropy=0.5, epochs=1.0))
    probe = draw.binomial(8, 0.4, 32)
    base = BASE | {"train_probe_avg_at_8": probe.mean() / 8, "train_probe_right": probe.tolist()}
    phases = pd.DataFrame(
        [
            {"start": "e000001", "member": f"{member} 0", "kind": kind, "cell": "bp16-n4-s0"}
            | {"started_at": 10.0 * step + late, "busy_seconds": 9.0, "waited_seconds": 0.0, "failed": False}
            for step in range(5)
            for member, kind, late in (("sampler", "sampling", 0.0), ("learner", "learning", 9.0))
        ]
    )
    tables = replace(tables_of(*cells, base=base), phases=phases)
    return analyse(tables, FitOptions(replicates=20))


@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.key)
def test_every_kind_can_be_drawn_is_readable_and_its_words_are_plain_text(kind: Any, noisy: Analysis) -> None:
    figure = drawn(kind.key, noisy)
    assert min(float(text.get_fontsize()) for text in figure.findobj(Text)) >= 8
    for words in (kind.title, kind.caption, kind.needs):
        assert words
        assert not set(words) & set('<>&"')
    assert len({other.key for other in FIGURES}) == len(FIGURES)


def test_nothing_is_drawn_from_nothing() -> None:
    nothing = analysed(base=None)
    diagnosis = diagnose(nothing)
    assert [kind.key for kind in FIGURES if kind.draw(nothing, diagnosis) is not None] == []


def test_the_frontier_figure_shows_evaluations_curves_frontier_and_base_model(pair: Analysis) -> None:
    axes = drawn("frontier", pair).axes[0]
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [values(line) for line in points] == [
        list(cell_rows(4, EARLY)["avg_at_4"]),
        list(cell_rows(16, LATE)["avg_at_4"]),
    ]
    band = next(line for line in axes.lines if line.get_linewidth() == 7)
    compute = np.array(places(band))
    expected = np.maximum(sigmoid(compute, *EARLY), sigmoid(compute, *LATE))
    assert values(band) == pytest.approx(expected, abs=2e-3)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "n = 4",
        "n = 16",
        "frontier",
        "base model, 0.300",
    ]


def test_in_a_large_grid_each_n_has_one_bold_line_its_best_over_problems_per_batch() -> None:
    tops = {
        (16, 4): 0.5,
        (32, 4): 0.55,
        (64, 4): 0.45,
        (128, 4): 0.4,
        (16, 16): 0.6,
        (32, 16): 0.5,
        (64, 16): 0.65,
    }
    cells = [cell_rows(n, (0.3, top, 5000.0, 1.5), bp) for (bp, n), top in tops.items()]
    axes = drawn("frontier", analysed(*cells)).axes[0]
    bold = [line for line in axes.lines if line.get_linewidth() == 1.6]
    assert [values(line)[-1] for line in bold] == pytest.approx(
        [float(sigmoid(places(bold[0])[-1], 0.3, top, 5000.0, 1.5)) for top in (0.55, 0.65)], abs=2e-3
    )


def test_the_joint_frontier_names_each_allocation_that_takes_the_lead(pair: Analysis) -> None:
    assert [
        words for words in texts(drawn("joint_frontier", pair)) if re.fullmatch(r"\(\d+, \d+\)", words)
    ] == [
        "(16, 4)",
        "(16, 16)",
    ]


def test_n_star_is_drawn_where_it_changes_and_one_n_alone_is_hollow() -> None:
    # n = 16 was not evaluated before 4,096 rollouts.
    late = cell_rows(16, LATE, marks=4096 * 2.0 ** np.arange(0, 6, 0.5))
    figure = drawn("n_star", analysed(cell_rows(4, EARLY), late))
    axes = figure.axes[0]
    step = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    compute, n = np.array(places(step)), np.asarray(values(step))
    assert (n == np.where(sigmoid(compute, *EARLY) >= sigmoid(compute, *LATE), 4, 16)).mean() > 0.98
    marks = [line for line in axes.lines if len(places(line)) == 1]
    hollow = [places(line)[0] for line in marks if line.get_markerfacecolor() == "white"]
    filled = [places(line)[0] for line in marks if line.get_markerfacecolor() != "white"]
    assert max(hollow) < 4096 <= min(filled)
    assert "law not identified" in texts(figure)
    assert "one n observed" in texts(figure)


def test_an_identified_law_is_drawn_with_its_own_numbers() -> None:
    design = SyntheticGrid(
        law=SyntheticLaw(4.0, 4.0, 5.5, 3.0),
        problems_per_batch=(32,),
        rollouts_per_problem=(4, 8, 16, 32, 64, 128, 256),
    )
    analysis = analyse(true_grid(design, marks_per_doubling=6), FitOptions(replicates=0))
    law = analysis.frontier.law.fit
    assert law is not None
    figure = drawn("n_star", analysis)
    assert "law" in texts(figure)
    line = next(line for line in figure.axes[0].lines if line.get_color() == "#d55e00")
    x = np.log10(np.array(places(line)))
    log2_n = law.rise / (1 + np.exp(-law.steepness * (x - law.midpoint))) + law.log2_floor
    assert np.log2(values(line)) == pytest.approx(log2_n)


def test_intervals_and_values_that_cannot_be_told_apart_are_drawn(noisy: Analysis) -> None:
    axes = drawn("n_star", noisy).axes[0]
    dashes = next(line for line in axes.lines if line.get_marker() == "_")
    shown = set(zip(places(dashes), values(dashes), strict=True))
    assert shown
    rivals = {
        (point.compute, n)
        for point in noisy.frontier.points
        for n in point.not_worse_n or ()
        if n != point.rollouts_per_problem
    }
    assert shown <= rivals


def test_at_a_fixed_batch_the_panels_mirror_each_other() -> None:
    cells = [cell_rows(n, shape, 256 // n) for n, shape in ((4, EARLY), (16, LATE))]
    extra = cell_rows(4, EARLY, problems=16)  # alone with its batch of 64
    left, right = drawn("fixed_batch", analysed(*cells, extra)).axes
    n, problems = (next(x for x in axes.lines if x.get_drawstyle() == "steps-post") for axes in (left, right))
    assert set(values(n)) == {4, 16}
    assert np.multiply(values(n), values(problems)) == pytest.approx(256)
    assert np.array(places(n)).min() == pytest.approx(1024 / 256)
    assert left.get_title(loc="left") == "batch of 256 rollouts: n*"


def test_no_batch_with_two_values_of_n_gives_no_fixed_batch_figure(pair: Analysis) -> None:
    assert drawn_or_none("fixed_batch", pair) is None


def test_bars_are_the_best_n_at_each_problems_per_batch_and_edges_are_starred() -> None:
    cells = []
    for problems, best in ((16, 16), (32, 64)):
        for n in (4, 16, 64):
            cell = cell_rows(n, (0.3, 0.7 if n == best else 0.5, 3000.0, 2.0), problems)
            cells.append(cell.assign(best_at_4=0.9 if n == 16 else 0.8))
    figure = drawn("metric_bars", analysed(*cells))
    heights = [patch.get_height() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert heights == [16, 64, 16, 16]  # avg at both B_p, then best
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert len(stars) == 1  # n = 64 at B_p = 32


def test_sensitivity_bars_are_the_ranges_and_say_them() -> None:
    figure = drawn(
        "sensitivity", analysed(cell_rows(4, (0.3, 0.5, 3000.0, 2.0)), cell_rows(16, (0.3, 0.6, 3000.0, 2.0)))
    )
    (bar,) = figure.axes[0].patches
    end = max(cell_rows(4, EARLY)["compute_rollouts"])
    points = 100 * 0.1 * float(sigmoid(end, 0, 1, 3000.0, 2.0))
    assert bar.get_width() == pytest.approx(points, abs=0.05)  # type: ignore[attr-defined]
    assert f"{points:.1f}" in texts(figure)


def test_histograms_are_shares_of_the_probe_at_base_middle_and_end() -> None:
    cell = cell_rows(4, EARLY)
    counts = [np.full(10, min(place, 8)) for place in range(len(cell))]
    counts[-1] = np.array([8] * 7 + [0] * 3)
    cell["train_probe_avg_at_8"], cell["train_probe_right"] = 0.5, counts
    base = BASE | {"train_probe_avg_at_8": 0.125, "train_probe_right": [1] * 10}
    (axes,) = drawn("histograms", analysed(cell, base=base)).axes
    heights = np.reshape([patch.get_height() for patch in axes.patches], (3, 9))  # type: ignore[attr-defined]
    middle = int(
        np.argmin(
            np.abs(np.log(cell["compute_rollouts"] / np.sqrt(cell["compute_rollouts"].iloc[[0, -1]].prod())))
        )
    )
    assert heights[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert heights[1].tolist() == [float(right == min(middle, 8)) for right in range(9)]
    assert heights[2] == pytest.approx([0.3, 0, 0, 0, 0, 0, 0, 0, 0.7])
    assert axes.get_xlabel() == "right answers of 8"


def test_tokens_are_drawn_against_rollouts(pair: Analysis) -> None:
    left, right = drawn("tokens", pair).axes
    assert len(left.lines) == 2
    assert values(left.lines[0]) == pytest.approx(1000 * np.array(places(left.lines[0])))
    assert values(right.lines[0]) == pytest.approx([1000] * len(values(right.lines[0])))


def test_training_has_one_panel_for_each_quantity_and_one_line_for_each_allocation(noisy: Analysis) -> None:
    figure = drawn("training", noisy)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "groups all right (share)",
        "entropy (nats)",
    ]
    assert [len(axes.lines) for axes in figure.axes] == [6, 6]
    assert values(figure.axes[0].lines[0]) == pytest.approx([0.15] * len(values(figure.axes[0].lines[0])))


def test_a_seed_that_stopped_early_does_not_bend_the_mean() -> None:
    whole, cut = (
        cell_rows(4, EARLY).assign(entropy=0.5),
        cell_rows(4, EARLY, seed=1).assign(entropy=0.9).iloc[:5],
    )
    (line,) = drawn("training", analysed(whole, cut)).axes[0].lines
    assert values(line) == [0.5] * len(whole)


def test_cells_that_fall_are_shown_with_their_onset(noisy: Analysis) -> None:
    figure = drawn("overfitting", noisy)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert sorted(title.splitlines()[0] for title in titles) == [
        f"bp{problems}-n4-s{seed}" for problems in (16, 32) for seed in (0, 1)
    ]
    assert all("overfits" in title for title in titles)
    onsets = [line for line in figure.axes[0].lines if line.get_color() == "#d55e00"]
    assert len(onsets) == 1
    compute = np.unique(cell_rows(4, EARLY)["compute_rollouts"])
    assert compute[-9] <= places(onsets[0])[0] <= compute[-6]


def test_without_a_fall_the_smallest_and_the_largest_n_are_shown() -> None:
    cells = [cell_rows(n, LATE).assign(train_reward=0.6) for n in (4, 16, 64)]
    titles = [axes.get_title(loc="left") for axes in drawn("overfitting", analysed(*cells)).axes]
    assert {title.splitlines()[0] for title in titles} >= {"bp16-n4-s0", "bp16-n64-s0"}


@pytest.mark.parametrize("key", ["histograms", "training", "overfitting", "pools"])
def test_what_a_table_does_not_hold_is_not_drawn(key: str, pair: Analysis) -> None:
    assert drawn_or_none(key, pair) is None


@pytest.mark.parametrize("unit", ["tokens", "accelerator_seconds"])
def test_axes_name_the_unit_of_compute(unit: str) -> None:
    analysis = analysed(cell_rows(4, EARLY), cell_rows(16, LATE), compute=unit)
    label = {
        "tokens": "compute C (generated tokens)",
        "accelerator_seconds": "compute C (accelerator-seconds)",
    }[unit]
    assert drawn("frontier", analysis).axes[0].get_xlabel() == label
    assert drawn("n_star", analysis).axes[0].get_xlabel() == label


def saved_by_matplotlib(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(
            buffer, format=kind, metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        )
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "write"), [("svg", svg_bytes), ("pdf", pdf_bytes)])
def test_equal_figures_give_equal_bytes_and_those_of_savefig(
    kind: str, write: Callable[[Figure], bytes], noisy: Analysis
) -> None:
    assert write(drawn("n_star", noisy)) == saved_by_matplotlib(drawn("n_star", noisy), kind)


def test_an_inline_figure_has_ids_of_its_own_and_no_address(pair: Analysis) -> None:
    markup = inline_svg(svg_bytes(drawn("sensitivity", pair)), "sensitivity", "What it is worth")
    assert markup.startswith('<svg role="img" aria-label="What it is worth"')
    assert "http" not in markup
    ids = set(re.findall(r'\bid="([^"]+)"', markup))
    used = set(re.findall(r'href="#([^"]+)"', markup)) | set(re.findall(r"url\(#([^)]+)\)", markup))
    assert all(name.startswith("sensitivity-") for name in ids)
    assert used <= ids


def test_many_evaluations_stay_a_small_file() -> None:
    marks = np.geomspace(2000, 2e6, 200)
    cells = [cell_rows(n, LATE, bp, marks=marks) for bp in (16, 32, 64) for n in (2, 4, 8, 16, 32)]
    analysis = analysed(*cells)
    written = svg_bytes(drawn("frontier", analysis))
    assert len(written) < 300_000
    # The points are an image, of the same resolution.
    assert written == saved_by_matplotlib(drawn("frontier", analysis), "svg")


@pytest.fixture(scope="module")
def with_dollars() -> Analysis:
    """Names of a cell and a metric that would be broken formulas."""
    name = "$x_{$"
    cells = []
    for n, shape in ((4, EARLY), (16, LATE)):
        cell = cell_rows(n, shape).assign(train_reward=0.6, entropy=0.5)
        cells.append(cell.assign(cell=f"{n}{name}").rename(columns={"avg_at_4": name}))
    return analysed(*(cell.assign(avg_at_4=cell[name]) for cell in cells), base={name: 0.3}, metric=name)


@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.key)
def test_a_dollar_sign_in_a_name_begins_no_formula(kind: Any, with_dollars: Analysis) -> None:
    figure = drawn_or_none(kind.key, with_dollars)
    if kind.key in ("frontier", "joint_frontier", "sensitivity", "overfitting"):
        assert figure is not None
        assert any("x_{" in words for words in texts(figure))
    if figure is not None:
        svg_bytes(figure)

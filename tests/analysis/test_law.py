"""The allocation law and when it is not identified."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.frontier import FrontierPoint
from analysis.law import fit_law, judge_law

PAPER = Path(__file__).parents[3] / "shared" / "paper"
needs_paper = pytest.mark.skipif(not PAPER.is_dir(), reason="the published frontier points are not here")


def points(pairs: Sequence[tuple[float, int]], compared: tuple[int, ...] = (8, 16)) -> list[FrontierPoint]:
    return [FrontierPoint(c, 0.5, f"bp32-n{n}-s0", n, 32, compared) for c, n in pairs]


def staircase(values: Sequence[int]) -> list[FrontierPoint]:
    """Ten points a level, evenly spaced in log C from 1e4."""
    levels = np.repeat(values, 10)
    return points([(10.0 ** (4 + 0.05 * i), int(n)) for i, n in enumerate(levels)])


@pytest.mark.parametrize(
    ("rise", "k", "mid", "b"), [(6.0, 4.0, 5.8, 3.0), (4.0, 9.0, 6.1, 2.0), (2.5, 1.5, 5.5, 4.0)]
)
def test_exact_points_give_back_the_parameters(rise: float, k: float, mid: float, b: float) -> None:
    x = np.linspace(4.0, 8.0, 60)
    fit = fit_law(x, rise / (1 + np.exp(-k * (x - mid))) + b)
    found = (fit.rise, fit.steepness, fit.log10_midpoint, fit.log2_floor)
    assert found == pytest.approx((rise, k, mid, b), abs=1e-3)
    assert fit.plateau == pytest.approx(2 ** (rise + b), rel=1e-3)
    assert fit.floor == pytest.approx(2**b, rel=1e-3)
    assert fit.sse < 1e-6
    assert fit.on_bound == ()
    assert float(fit.predict(10**mid)) == pytest.approx(2 ** (rise / 2 + b), rel=1e-3)


def test_a_step_rests_on_the_bound_of_k_and_says_so() -> None:
    x = np.linspace(5.0, 7.0, 41)
    fit = fit_law(x, np.where(x < 6.03, 3.0, 7.0))
    assert fit.on_bound == ("k at its upper bound 50",)


@needs_paper
@pytest.mark.parametrize(
    ("name", "rise", "mid", "b"), [("q1_easy", 6.09, 5.84, 2.73), ("q3_easy", 5.67, 6.08, 3.08)]
)
def test_the_published_easy_frontiers_give_the_printed_rows(
    name: str, rise: float, mid: float, b: float
) -> None:
    data = pd.read_csv(PAPER / f"{name}_rollouts.csv")
    fit = fit_law(data["log10_compute_rollouts"], data["log2_n"])
    assert fit.rise + fit.log2_floor == pytest.approx(rise + b, abs=0.25)
    assert fit.log2_floor == pytest.approx(b, abs=0.15)
    assert fit.log10_midpoint == pytest.approx(mid, abs=0.1)


@needs_paper
def test_the_published_hard_frontier_is_fitted_best_by_a_step() -> None:
    data = pd.read_csv(PAPER / "q1_hard_rollouts.csv")
    fit = fit_law(data["log10_compute_rollouts"], data["log2_n"])
    assert fit.on_bound == ("k at its upper bound 50",)
    assert fit.sse == pytest.approx(37.0, abs=0.5)  # the printed row's is 44
    assert fit.rise + fit.log2_floor == pytest.approx(6.4, abs=0.1)


def test_three_values_of_n_do_not_identify_the_law_and_print_no_parameters() -> None:
    verdict = judge_law(staircase([4, 16, 64]), [4, 16, 64])
    assert not verdict.identified
    assert verdict.fit is None
    assert verdict.text.startswith(
        "The law is not identified: the fitted cells hold 3 values of n (4, 16, 64)"
    )
    assert "L =" not in verdict.text


def test_an_optimum_of_two_values_does_not_identify_the_law() -> None:
    verdict = judge_law(staircase([8, 32]), [8, 16, 32, 64])
    assert not verdict.identified
    assert "n* takes 2 values (8, 32)" in verdict.text


def test_a_plateau_at_the_largest_n_is_named_as_the_edge_of_the_grid() -> None:
    verdict = judge_law(staircase([16, 32, 64, 64, 64]), [8, 16, 32, 64])
    assert verdict.identified
    assert not verdict.plateau_identified
    assert "Plateau not identified: it rests on the edge of the grid (largest n = 64)" in verdict.text
    assert "plateau n =" not in verdict.text
    assert verdict.floor_identified


def test_a_plateau_inside_the_grid_is_reported() -> None:
    verdict = judge_law(staircase([8, 8, 8, 16, 32, 64, 64, 64]), [8, 16, 32, 64, 128])
    assert verdict.plateau_identified
    assert verdict.fit is not None
    assert verdict.fit.plateau == pytest.approx(64, rel=0.1)
    assert "Floor not identified: it rests on the edge of the grid (smallest n = 8)" in verdict.text


def test_an_optimum_that_still_rises_leaves_the_plateau_open() -> None:
    x = np.linspace(4.0, 5.8, 40)
    rising = [(float(10.0**v), int(2 ** round(3 + 1.9 * (v - 4) ** 1.4))) for v in x]
    verdict = judge_law(points(rising), [8, 16, 32, 64, 128, 256, 512, 1024])
    assert verdict.identified
    assert not verdict.plateau_identified
    assert "still rises" in verdict.text


def test_an_optimum_that_falls_does_not_identify_a_law_that_rises() -> None:
    verdict = judge_law(staircase([64, 32, 16, 8]), [8, 16, 32, 64])
    assert verdict.text == (
        "The law is not identified: n* does not rise with compute, and the law can only rise."
    )


def test_a_parameter_on_a_bound_is_named_in_the_verdict() -> None:
    steps = points([(10.0**x, 8 if x < 5.03 else 128) for x in np.linspace(4.0, 6.0, 41)])
    verdict = judge_law([*steps, *points([(1.01e6, 64)])], [8, 16, 64, 128, 256])
    assert "The fit rests on a bound: k at its upper bound 50" in verdict.text


def test_points_where_one_n_alone_was_observed_do_not_count() -> None:
    contested = staircase([8, 32])
    alone = points([(1e8, 64), (2e8, 128)], compared=(64,))
    assert "n* takes 2 values (8, 32)" in judge_law(contested + alone, [8, 32, 64, 128]).text


def test_no_fitted_cell_is_the_reason_when_there_is_none() -> None:
    assert judge_law([], []).text == "The law is not identified: no cell could be fitted."

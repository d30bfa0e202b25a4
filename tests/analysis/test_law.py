"""The allocation law and when it is not identified."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import curve_fit

from analysis.fitting.intervals import interval
from analysis.fitting.law import fit_law
from analysis.fitting.observations import Allocation
from analysis.fitting.verdict import NStar, judge_law

PAPER = Path(__file__).parents[3] / "shared" / "paper"
needs_paper = pytest.mark.skipif(not PAPER.is_dir(), reason="the published frontier points are not here")
HARD_N = (8, 16, 32, 64, 128, 256, 512)
"""n in {8..2048} with B_p * n <= 16,384 at B_p = 32."""


def law(x: NDArray[np.float64], rise: float, k: float, mid: float, b: float) -> NDArray[np.float64]:
    return rise / (1 + np.exp(-k * (x - mid))) + b


def stars(
    x: ArrayLike,
    log2_n: ArrayLike,
    grid_n: Sequence[int],
    edge: Allocation | None = None,
) -> NStar:
    """Points that are all worth an evaluation, without intervals."""
    at = np.asarray(x, dtype=float)
    return NStar(at, np.asarray(log2_n, dtype=float), None, tuple(grid_n), len(at), None, edge)


def staircase(values: Sequence[int], grid_n: Sequence[int], edge: Allocation | None = None) -> NStar:
    """Ten points a level, evenly spaced in log C from 1e4."""
    levels = np.repeat(np.log2(values), 10)
    return stars(4 + 0.05 * np.arange(len(levels)), levels, grid_n, edge)


def published(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    data = pd.read_csv(PAPER / f"{name}_rollouts.csv")
    return data["log10_compute_rollouts"].to_numpy(), data["log2_n"].to_numpy(dtype=float)


@pytest.mark.parametrize(
    ("rise", "k", "mid", "b"), [(6.0, 4.0, 5.8, 3.0), (4.0, 9.0, 6.1, 2.0), (2.5, 1.5, 5.5, 4.0)]
)
def test_exact_points_give_back_the_parameters(rise: float, k: float, mid: float, b: float) -> None:
    x = np.linspace(4.0, 8.0, 60)
    fit = fit_law(x, law(x, rise, k, mid, b))
    found = (fit.rise, fit.steepness, fit.midpoint, fit.log2_floor)
    assert found == pytest.approx((rise, k, mid, b), abs=1e-3)
    assert fit.plateau == pytest.approx(2 ** (rise + b), rel=1e-3)
    assert fit.floor == pytest.approx(2**b, rel=1e-3)
    assert fit.sse < 1e-6
    assert fit.on_bound == ()
    assert float(fit.predict(10**mid)) == pytest.approx(2 ** (rise / 2 + b), rel=1e-3)


def test_the_published_fixed_batch_law_is_recovered_on_its_linear_axis() -> None:
    steps = np.linspace(1.0, 600.0, 80)
    fit = fit_law(steps, law(steps, 7.10, 0.01, 91.7, 2.0), axis="linear")
    found = (fit.rise, fit.steepness, fit.midpoint, fit.log2_floor)
    assert found == pytest.approx((7.10, 0.01, 91.7, 2.0), rel=1e-2)
    assert float(fit.predict(91.7)) == pytest.approx(2 ** (7.10 / 2 + 2.0), rel=1e-2)
    # B_p* = B / n* follows the mirrored law: -k, the same M0 and L, and a floor of B / plateau.
    mirrored = 8192 / fit.predict(steps)
    assert np.log2(mirrored) == pytest.approx(law(steps, 7.10, -0.01, 91.7, 13 - 9.10), abs=0.01)


def test_no_start_of_a_local_optimiser_fits_the_law_better() -> None:
    rng = np.random.default_rng(1)
    x = np.linspace(5.0, 7.0, 41)
    for _ in range(3):
        y = np.rint(
            law(x, rng.uniform(2, 6), rng.uniform(2, 30), rng.uniform(5.4, 6.6), 3) + rng.normal(0, 0.4, 41)
        )
        best = np.inf
        for _ in range(10):
            start = [rng.uniform(1, 7), rng.uniform(1, 40), rng.uniform(5, 7), rng.uniform(1, 5)]
            p, _ = curve_fit(law, x, y, start, bounds=([0, 0.1, 4, 0], [16, 50, 8, 16]), max_nfev=500)
            best = min(best, float(((law(x, *p) - y) ** 2).sum()))
        assert fit_law(x, y).sse <= best * (1 + 1e-6)


def test_a_step_rests_on_the_bound_of_k_and_says_so() -> None:
    x = np.linspace(5.0, 7.0, 41)
    assert fit_law(x, np.where(x < 6.03, 3.0, 7.0)).on_bound == ("k at its upper bound 50",)
    steps = np.linspace(0.0, 200.0, 41)  # on a linear axis 50 per half the range: 0.5 per step
    assert fit_law(steps, np.where(steps < 103, 3.0, 7.0), "linear").on_bound == ("k at its upper bound 0.5",)


def test_a_midpoint_on_its_bound_is_named_as_its_axis_names_it() -> None:
    x = np.linspace(0.0, 10.0, 41)
    for axis, name in (("log10", "log10 C0"), ("linear", "M0")):
        fit = fit_law(x, law(x, 8.0, 0.4, 25.0, 3.0), axis)  # type: ignore[arg-type]
        assert any(words.startswith(f"{name} at its upper bound") for words in fit.on_bound)


def test_three_points_are_too_few_for_the_law() -> None:
    with pytest.raises(ValueError, match="3 points"):
        fit_law([4.0, 5.0, 6.0], [3.0, 4.0, 5.0])
    verdict = judge_law(stars([4.0, 5.0, 6.0], [3.0, 4.0, 5.0], [8, 16, 32, 64]), 0.9)
    assert not verdict.identified
    assert "at 3 computes only" in verdict.text


@needs_paper
@pytest.mark.parametrize(
    ("name", "rise", "mid", "b"), [("q1_easy", 6.09, 5.84, 2.73), ("q3_easy", 5.67, 6.08, 3.08)]
)
def test_the_published_easy_frontiers_give_the_printed_rows(
    name: str, rise: float, mid: float, b: float
) -> None:
    fit = fit_law(*published(name))
    assert fit.rise + fit.log2_floor == pytest.approx(rise + b, abs=0.25)
    assert fit.log2_floor == pytest.approx(b, abs=0.15)
    assert fit.midpoint == pytest.approx(mid, abs=0.1)
    assert fit.on_bound == ()
    # Observed n* = 512 of n up to 2048.
    verdict = judge_law(stars(*published(name), (*HARD_N, 1024, 2048)), 0.9)
    assert verdict.plateau_identified
    assert verdict.forms[0].name == "sigmoid"


@needs_paper
def test_the_published_hard_frontier_rests_on_the_bound_of_k_and_identifies_no_plateau() -> None:
    x, y = published("q1_hard")
    verdict = judge_law(stars(x, y, HARD_N), 0.9)
    fit = verdict.fit
    assert fit is not None
    assert fit.on_bound == ("k at its upper bound 50",)
    assert "The fit rests on a bound: k at its upper bound 50" in verdict.text
    assert not verdict.plateau_identified
    assert "Plateau not identified" in verdict.text
    assert "plateau n =" not in verdict.text
    assert fit.rise + fit.log2_floor == pytest.approx(6.4, abs=0.1)
    printed_row = float(((law(x, 4.47, 7.23, 5.84, 2.79) - y) ** 2).sum())
    assert (fit.sse, printed_row) == pytest.approx((37.0, 44.0), abs=0.5)


def test_three_values_of_n_do_not_identify_the_law_and_print_no_parameters() -> None:
    verdict = judge_law(staircase([4, 16, 64], [4, 16, 64]), 0.9)
    assert not verdict.identified
    assert verdict.fit is None
    assert verdict.text.startswith(
        "The law is not identified: the fitted cells hold 3 values of n (4, 16, 64)"
    )
    assert "L =" not in verdict.text


def test_an_optimum_of_two_values_does_not_identify_the_law() -> None:
    verdict = judge_law(staircase([8, 32], [8, 16, 32, 64]), 0.9)
    assert not verdict.identified
    assert "n* takes 2 values (8, 32)" in verdict.text


def test_a_plateau_at_the_edge_of_the_grid_is_named_as_such() -> None:
    at_edge = staircase([16, 32, 64, 64, 64], [8, 16, 32, 64], edge=Allocation(64, 16))
    verdict = judge_law(at_edge, 0.9)
    assert verdict.identified
    assert not verdict.plateau_identified
    assert "Plateau not identified: it rests on the edge of the grid (bp16-n64" in verdict.text
    assert "plateau n =" not in verdict.text


def test_a_plateau_inside_the_grid_is_reported_and_a_floor_at_its_edge_is_not() -> None:
    verdict = judge_law(staircase([8, 8, 8, 16, 32, 64, 64, 64], [8, 16, 32, 64, 128]), 0.9)
    assert verdict.plateau_identified
    assert verdict.fit is not None
    assert verdict.fit.plateau == pytest.approx(64, rel=0.1)
    assert "plateau n = 6" in verdict.text
    assert not verdict.floor_identified
    assert "Floor not identified: it rests on the edge of the grid (smallest n = 8)" in verdict.text
    assert "floor n =" not in verdict.text


def test_a_floor_inside_the_grid_is_reported() -> None:
    verdict = judge_law(staircase([8, 8, 8, 16, 32, 64, 64, 64], [2, 4, 8, 16, 32, 64, 128]), 0.9)
    assert verdict.floor_identified
    assert "floor n = 8" in verdict.text


def test_an_optimum_that_rises_from_the_first_point_on_leaves_the_floor_open() -> None:
    x = np.linspace(4.0, 8.0, 80)
    rising = np.rint(8 - 4 * np.exp(-1.2 * (x - 4)))  # 16 at the first point, 256 at the last
    verdict = judge_law(stars(x, rising, [2**k for k in range(2, 11)]), 0.9)
    assert verdict.plateau_identified
    assert not verdict.floor_identified
    assert "floor n =" not in verdict.text


def test_an_optimum_that_still_rises_leaves_the_plateau_open() -> None:
    x = np.linspace(4.0, 5.8, 40)
    rising = np.rint(3 + 1.9 * (x - 4) ** 1.4)
    verdict = judge_law(stars(x, rising, [2**k for k in range(3, 11)]), 0.9)
    assert verdict.identified
    assert not verdict.plateau_identified
    assert "Plateau not identified" in verdict.text


def test_a_power_law_is_called_one_and_shows_no_saturation() -> None:
    x = np.linspace(4.0, 8.0, 80)
    verdict = judge_law(stars(x, np.rint(3 + 1.6 * (x - 4)), [2**k for k in range(2, 12)]), 0.9)
    assert verdict.forms[0].name == "log-linear"
    assert (verdict.plateau_identified, verdict.floor_identified) == (False, False)
    assert "power of C" in verdict.text
    sigmoid = next(form for form in verdict.forms if form.name == "sigmoid")
    assert sigmoid.aicc > verdict.forms[0].aicc


def test_an_optimum_that_jumps_about_a_level_is_called_flat() -> None:
    x = np.linspace(4.0, 6.0, 60)
    jumping = np.random.default_rng(0).choice([4.0, 5.0, 6.0], 60)
    verdict = judge_law(stars(x, jumping, [8, 16, 32, 64, 128]), 0.9)
    assert not verdict.identified
    assert verdict.forms[0].name == "flat"
    assert "flat" in verdict.text


def test_an_n_that_is_never_beaten_beyond_doubt_leaves_a_flat_optimum_possible() -> None:
    rising = staircase([8, 16, 32, 64], [8, 16, 32, 64, 128])
    verdict = judge_law(replace(rising, unrejected_n=(16, 32)), 0.9)
    assert not verdict.identified
    assert "n = 16, 32 may be the best throughout" in verdict.text
    assert judge_law(replace(rising, unrejected_n=()), 0.9).identified


def test_an_optimum_that_falls_does_not_identify_a_law_that_rises() -> None:
    verdict = judge_law(staircase([64, 32, 16, 8], [8, 16, 32, 64]), 0.9)
    assert verdict.text == (
        "The law is not identified: n* does not rise with compute, and the law can only rise."
    )


def test_the_flat_and_the_line_are_compared_by_their_sums_of_squares() -> None:
    x = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    y = np.array([3.0, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    forms = {form.name: form for form in judge_law(stars(x, y, [4, 8, 16, 32, 64, 128, 256]), 0.9).forms}
    assert forms["flat"].sse == pytest.approx(y.var() * 10)
    line = np.polyval(np.polyfit(x, y, 1), x)
    assert forms["log-linear"].sse == pytest.approx(((y - line) ** 2).sum())
    assert [forms[name].parameters for name in ("flat", "log-linear", "sigmoid")] == [1, 2, 4]


def test_intervals_come_from_the_replicates_and_hold_the_fit() -> None:
    rng = np.random.default_rng(2)
    x = np.linspace(4.0, 8.0, 60)
    moved = rng.normal(6.0, 0.1, 200)
    replicates = np.rint(np.stack([law(x, 5.0, 4.0, mid, 3.0) for mid in moved], axis=1))
    point = replace(
        stars(x, np.rint(law(x, 5.0, 4.0, 6.0, 3.0)), [2**k for k in range(2, 11)]), replicates=replicates
    )
    verdict = judge_law(point, 0.9)
    assert verdict.fit is not None
    low, high = verdict.intervals["midpoint"]
    assert low < verdict.fit.midpoint < high
    assert (low, high) == pytest.approx((6 - 0.1645, 6 + 0.1645), abs=0.05)
    below, above = verdict.intervals["log2_plateau"]
    assert below == pytest.approx(8.0, abs=0.1) and above == pytest.approx(8.0, abs=0.1)
    assert verdict.forms[0].preferred_share == pytest.approx(1.0)
    assert "[" in verdict.text


def test_no_fitted_allocation_is_the_reason_when_there_is_none() -> None:
    nothing = NStar(np.empty(0), np.empty(0), None, (), 0, None, None)
    assert judge_law(nothing, 0.9).text == "The law is not identified: no allocation could be fitted."


def test_an_interval_leaves_half_of_the_rest_on_each_side() -> None:
    replicates = np.linspace(0.0, 100.0, 101)
    assert interval(replicates, 0.9) == pytest.approx((5.0, 95.0))
    assert interval(replicates, 0.5) == pytest.approx((25.0, 75.0))


def test_forms_are_scored_by_aicc_with_the_variance_of_rounding() -> None:
    # AICc = N ln(SSE / N + 1/12) + 2 p + 2 p (p + 1) / (N - p - 1), N = 10, p one more than the form's own parameters.
    # Flat: SSE = 2 (4 + 1 + 0 + 1 + 4) = 20. Line: Sxx = 82.5, Sxy = 40, SSE = 20 - 40^2 / 82.5 = 20 / 33.
    y = [3.0, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    verdict = judge_law(stars(np.arange(10.0), y, [4, 8, 16, 32, 64, 128, 256]), 0.9)
    forms = {form.name: form for form in verdict.forms}
    assert forms["flat"].aicc == pytest.approx(10 * np.log(25 / 12) + 4 + 12 / 7)
    assert forms["log-linear"].aicc == pytest.approx(10 * np.log(19 / 132) + 6 + 4)
    sse = forms["sigmoid"].sse
    assert forms["sigmoid"].aicc == pytest.approx(10 * np.log(sse / 10 + 1 / 12) + 10 + 15)


@pytest.mark.parametrize(("at_the_edge", "identified"), [(2, True), (10, False)])
def test_a_plateau_whose_interval_reaches_the_edge_of_the_grid_is_not_identified(
    at_the_edge: int, identified: bool
) -> None:
    # n* ends at 64 and the grid at 128; the upper end of the 90 % interval is 128 once 5 % of the replicates end there.
    inside = staircase([8, 8, 8, 16, 32, 64, 64, 64], [8, 16, 32, 64, 128])
    replicates = np.tile(inside.log2_n[:, None], (1, 100))
    replicates[-10:, :at_the_edge] = 7.0
    verdict = judge_law(replace(inside, replicates=replicates), 0.9)
    assert verdict.plateau_identified is identified
    words = "the interval of n* reaches the edge of the grid (largest n = 128)"
    assert (words in verdict.text) is not identified

"""The envelope, n*(C) and where it changes."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from analysis.fitting.curves import AllocationCurve
from analysis.fitting.frontier import FrontierPoint, crossovers, frontier_points, frontier_table
from analysis.fitting.landscape import Landscape, best_by_n, compute_grid, landscape, table_budgets
from analysis.fitting.observations import Allocation
from tests.analysis.conftest import Sigmoid, curve_of, sigmoid

# With s = 1 and equal R0 the curves g1 / (1 + m1 / C) and g2 / (1 + m2 / C) meet at
# C = (g2 m1 - g1 m2) / (g1 - g2) = (0.4 * 2000 - 0.3 * 5000) / (0.3 - 0.4) = 7000.
FAST: Sigmoid = (0.3, 0.6, 2000.0, 1.0)
HIGH: Sigmoid = (0.3, 0.7, 5000.0, 1.0)


def points_over(land: Landscape) -> list[FrontierPoint]:
    return frontier_points(land, best_by_n(land), 0.9)


def points_of(*curves: AllocationCurve, at: NDArray[np.float64] | None = None) -> list[FrontierPoint]:
    return points_over(landscape(curves, compute_grid(curves) if at is None else at))


def shifts(sd: float, seed: int) -> NDArray[np.float64]:
    return sd * np.random.default_rng(seed).standard_normal(1000)


def test_the_crossing_of_two_curves_is_found_where_they_are_equal() -> None:
    land = landscape([curve_of(4, FAST), curve_of(16, HIGH)], np.geomspace(1e3, 1e5, 50))
    (change,) = crossovers(land, points_over(land), 0.9)
    assert (change.before, change.after, change.kind) == (4, 16, "crossing")
    assert change.compute == pytest.approx(7000.0, rel=1e-6)
    assert change.compute_interval is None


def test_the_frontier_is_the_largest_observed_curve() -> None:
    before, after = points_of(curve_of(4, FAST), curve_of(16, HIGH), at=np.array([5000.0, 10_000.0]))
    assert (before.allocation, after.allocation) == (Allocation(4, 16), Allocation(16, 16))
    assert before.reward == pytest.approx(0.3 + 0.3 / 1.4)
    assert after.reward == pytest.approx(0.3 + 0.4 / 1.5)
    assert (before.reward_interval, before.rollouts_per_problem_interval, before.not_worse_n) == (None,) * 3


def test_the_frontier_never_leaves_an_allocations_observed_compute() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        lows = 10.0 ** rng.uniform(2, 4, 5)
        spans = [(float(low), float(low * 10.0 ** rng.uniform(0.3, 2))) for low in lows]
        shapes: list[Sigmoid] = [(0.3, 0.3 + 0.1 * k, 1e3 * 3**k, 1.0) for k in range(1, 6)]
        curves = [curve_of(2**k, shapes[k - 1], span=spans[k - 1]) for k in range(1, 6)]
        points = points_of(*curves)
        assert points
        for point in points:
            inside = [k for k, (low, high) in enumerate(spans) if low <= point.compute <= high]
            rewards = [float(sigmoid(point.compute, *shapes[k])) for k in inside]
            assert point.compared_n == tuple(2 ** (k + 1) for k in inside)
            assert point.rollouts_per_problem == 2 ** (inside[int(np.argmax(rewards))] + 1)
            assert point.reward == pytest.approx(max(rewards))


def test_a_change_where_an_allocations_observations_begin_is_no_crossing() -> None:
    late = curve_of(64, (0.3, 0.9, 2000.0, 1.0), span=(2e4, 1e5))
    land = landscape([curve_of(4, FAST), late], compute_grid([curve_of(4, FAST), late]))
    points = points_over(land)
    (change,) = crossovers(land, points, 0.9)
    assert change.kind == "coverage"
    assert change.compute_interval is None
    assert change.compute == pytest.approx(2e4, rel=0.05)
    assert [points[0].is_contested, points[-1].is_contested] == [False, True]


def test_equal_rewards_go_to_the_smaller_n_and_to_no_crossing() -> None:
    land = landscape([curve_of(4, FAST), curve_of(16, FAST)], np.geomspace(1e3, 1e5, 20))
    points = points_over(land)
    assert {point.rollouts_per_problem for point in points} == {4}
    assert crossovers(land, points, 0.9) == []
    assert set(best_by_n(land).log2_n_star) == {2.0}


def test_the_grid_ends_where_the_first_complete_cell_ends() -> None:
    # A budget of 33,000: 515 steps of 64 are 32,960 and 32 steps of 1,024 are 32,768.
    small = curve_of(4, FAST, span=(1024, 32_960))
    large = curve_of(64, HIGH, span=(1024, 32_768))
    assert compute_grid([small, large])[-1] == 32_768
    stopped_early = curve_of(64, HIGH, span=(1024, 8192))
    assert compute_grid([small, stopped_early])[-1] == 32_960
    assert compute_grid([small, large])[0] == 1024


def test_a_change_of_problems_per_batch_alone_is_no_crossover_of_n() -> None:
    curves = [curve_of(4, FAST), curve_of(4, HIGH, problems=32)]
    land = landscape(curves, compute_grid(curves))
    points = points_over(land)
    assert {point.problems_per_batch for point in points} == {16, 32}
    assert crossovers(land, points, 0.9) == []
    assert not any(point.is_contested for point in points)


def test_the_best_of_each_n_is_taken_over_problems_per_batch() -> None:
    curves = [curve_of(4, FAST), curve_of(4, HIGH, problems=32), curve_of(16, (0.3, 0.5, 2e3, 1.0))]
    best = best_by_n(landscape(curves, np.array([5000.0, 10_000.0])))
    assert best.values == (4, 16)
    assert best.reward[0] == pytest.approx([0.3 + 0.3 / 1.4, 0.3 + 0.4 / 1.5])


def test_identical_curves_are_never_told_apart_and_far_ones_always() -> None:
    common = shifts(0.02, 1)
    curves = [
        curve_of(4, FAST, replicates=common),
        curve_of(8, FAST, replicates=common),
        curve_of(16, (0.3, 0.45, 2000.0, 1.0), replicates=common),
    ]
    for point in points_of(*curves):
        assert point.not_worse_n == (4, 8)


def test_noise_of_its_own_makes_two_curves_hard_to_tell_apart() -> None:
    # The difference at C = 1e5 is 0.4 / 1.05 - 0.3 / 1.02 = 0.0868; its standard error sqrt(2) * sd. The upper end of the 90 %
    # interval is -0.0868 + 1.645 * sqrt(2) * sd, above 0 from sd = 0.0373 on.
    at = np.array([1e5])
    for sd, told_apart in ((0.030, True), (0.045, False)):
        curves = [curve_of(4, FAST, replicates=shifts(sd, 1)), curve_of(16, HIGH, replicates=shifts(sd, 2))]
        (point,) = points_of(*curves, at=at)
        assert point.not_worse_n == ((16,) if told_apart else (4, 16))


def test_noise_that_all_share_tells_nothing_against_the_best() -> None:
    common = shifts(0.1, 1)
    curves = [curve_of(4, FAST, replicates=common), curve_of(16, HIGH, replicates=common)]
    (point,) = points_of(*curves, at=np.array([1e5]))
    assert point.not_worse_n == (16,)
    assert point.rollouts_per_problem_interval == (16, 16)


def test_intervals_are_quantiles_of_the_replicates() -> None:
    drawn = shifts(0.02, 1)
    (point,) = points_of(curve_of(4, FAST, replicates=drawn), at=np.array([2000.0]))
    assert point.reward == pytest.approx(0.45)
    assert point.reward_interval == pytest.approx(tuple(0.45 + np.quantile(drawn, (0.05, 0.95))))


def test_the_interval_of_n_star_holds_every_n_that_often_leads() -> None:
    curves = [curve_of(4, FAST, replicates=shifts(0.02, 1)), curve_of(16, HIGH, replicates=shifts(0.02, 2))]
    near, far = points_of(*curves, at=np.array([7000.0, 1e5]))
    assert near.rollouts_per_problem_interval == (4, 16)
    assert far.rollouts_per_problem_interval == (16, 16)


def test_the_interval_of_a_crossing_moves_with_the_curves() -> None:
    # Shifting one curve by d moves the crossing to where 0.4 / (1 + 5000 / C) - 0.3 / (1 + 2000 / C) = -d.
    drawn = np.linspace(-0.01, 0.01, 1001)
    curves = [curve_of(4, FAST, replicates=0 * drawn), curve_of(16, HIGH, replicates=drawn)]
    land = landscape(curves, np.geomspace(1e3, 1e5, 120))
    (change,) = crossovers(land, points_over(land), 0.9)
    assert change.compute_interval is not None
    low, high = change.compute_interval
    assert low < 7000 < high
    for end, shift in ((low, 0.009), (high, -0.009)):
        lead = sigmoid(end, *HIGH) - sigmoid(end, *FAST)
        assert lead == pytest.approx(-shift, abs=2e-4)


def test_a_crossing_that_many_replicates_do_not_have_gets_no_interval() -> None:
    drawn = shifts(0.2, 1)  # the curves differ by at most 0.1
    curves = [curve_of(4, FAST, replicates=0 * drawn), curve_of(16, HIGH, replicates=drawn)]
    land = landscape(curves, np.geomspace(1e3, 1e5, 120))
    (change,) = crossovers(land, points_over(land), 0.9)
    assert change.compute_interval is None


def test_the_short_table_lists_powers_of_two_and_the_end() -> None:
    grid = compute_grid([curve_of(4, FAST, span=(1000, 5000))])
    assert table_budgets(grid).tolist() == [1024.0, 2048.0, 4096.0, 5000.0]


def test_the_table_for_people_has_a_row_for_each_budget() -> None:
    drawn = shifts(0.001, 1)
    curves = [curve_of(4, FAST, replicates=drawn), curve_of(16, HIGH, replicates=drawn)]
    table = frontier_table(points_of(*curves, at=np.array([4096.0, 16_384.0])))
    assert table["compute"].tolist() == [4096, 16_384]
    assert table["n_star"].tolist() == [4, 16]
    assert table["compared_n"].tolist() == ["4, 16", "4, 16"]
    assert table["not_worse_n"].tolist() == ["4", "16"]
    assert table["n_star_interval"].tolist() == ["4 to 4", "16 to 16"]


def test_no_curves_give_no_frontier() -> None:
    assert compute_grid([]).size == 0
    assert points_of() == []
    assert table_budgets(compute_grid([])).size == 0
    assert frontier_table([]).empty


def test_allocations_whose_computes_do_not_meet_are_never_compared() -> None:
    early = curve_of(4, FAST, span=(1e3, 1e4))
    late = curve_of(16, HIGH, span=(1e5, 1e6))
    points = points_of(early, late)
    assert not any(point.is_contested for point in points)
    assert not any(1e4 < point.compute < 1e5 for point in points)


MAX_OF_SIX_SD = 0.645
"""Standard deviation of the largest of six independent standard normal draws."""


def best_of_six(levels: NDArray[np.float64], sd: float) -> NDArray[np.float64]:
    """(R,) best reward of n = 4 over six B_p with level curves and noise of their own."""
    rng = np.random.default_rng(5)
    curves = [
        curve_of(4, (level, level, 2000.0, 1.0), problems=2**k, replicates=sd * rng.standard_normal(20_000))
        for k, level in enumerate(levels)
    ]
    best = best_by_n(landscape(curves, np.array([1e4])))
    assert best.replicates is not None
    return np.asarray(best.replicates[0, 0])


def test_the_best_over_b_p_of_equal_curves_varies_as_the_best_of_several_draws() -> None:
    # The estimates differ as much as noise makes six equal curves differ: their standard deviation is the noise's.
    levels = np.array([-1.27, -0.64, -0.20, 0.20, 0.64, 1.27])
    levels = 0.5 + 0.01 * levels / levels.std(ddof=1)
    best = best_of_six(levels, sd=0.01)
    assert best.std() == pytest.approx(0.01 * MAX_OF_SIX_SD, rel=0.04)
    assert best.mean() == pytest.approx(levels.max(), abs=1e-9)


def test_the_best_over_b_p_of_curves_far_apart_varies_as_the_leader_alone() -> None:
    levels = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    best = best_of_six(levels, sd=0.01)
    assert best.std() == pytest.approx(0.01, rel=0.03)
    assert best.mean() == pytest.approx(0.7, abs=1e-9)


def test_of_several_crossings_in_a_replicate_the_nearest_counts() -> None:
    # In each replicate the lead turns positive three times: at 2,000, near 7,000 and at 50,000.
    compute = np.geomspace(1e3, 1e5, 400)
    near = np.linspace(6000.0, 8000.0, 101)
    places = np.array([0 * near + 2000, 0 * near + 3500, near, 0 * near + 20_000, 0 * near + 50_000])
    lead = np.log(compute[:, None] / places[:, None, :]).prod(axis=0)
    curves = [curve_of(4, FAST), curve_of(16, HIGH)]
    land = replace(landscape(curves, compute), replicates=np.stack([0 * lead, lead]))
    (change,) = crossovers(land, points_over(land), 0.9)
    # 5 % and 95 % of evenly spaced places.
    assert change.compute_interval == pytest.approx((6100.0, 7900.0), rel=5e-3)


def test_a_compute_to_which_a_batch_adds_nothing_still_has_a_grid() -> None:
    # Numbers of double precision around 1e20 are 16,384 apart.
    grid = compute_grid([curve_of(4, FAST, span=(1e18, 1e20)), curve_of(16, HIGH, span=(1e18, 1e20))])
    assert (grid[0], grid[-1]) == (1e18, 1e20)
    assert (np.diff(grid) > 0).all()

"""The envelope, n*(C) and where it changes."""

import numpy as np
import pytest

from analysis.curves import CellCurve, CurveFit
from analysis.frontier import compute_grid, crossovers, envelope, frontier_table, table_budgets


def curve(
    n: int,
    gain: float,
    midpoint: float,
    span: tuple[float, float] = (1e3, 1e5),
    problems: int = 16,
) -> CellCurve:
    fit = CurveFit(0.3, 0.3 + gain, midpoint, 1.0, True, (), 8, 0.0, *span)
    return CellCurve(f"bp{problems}-n{n}-s0", problems, n, 0, fit)


# With s = 1 and equal R0 the curves g1 / (1 + m1 / C) and g2 / (1 + m2 / C) meet at
# C = (g2 m1 - g1 m2) / (g1 - g2) = (0.4 * 2000 - 0.3 * 5000) / (0.3 - 0.4) = 7000.
FAST, HIGH = curve(4, 0.3, 2000.0), curve(16, 0.4, 5000.0)


def test_the_crossing_of_two_curves_is_found_where_they_are_equal() -> None:
    points = envelope([FAST, HIGH], compute_grid([FAST, HIGH]))
    (change,) = crossovers([FAST, HIGH], points)
    assert (change.before, change.after, change.kind) == (4, 16, "crossing")
    assert change.compute_rollouts == pytest.approx(7000.0, rel=1e-6)


def test_the_envelope_is_the_largest_observed_curve() -> None:
    before, after = envelope([FAST, HIGH], np.array([5000.0, 10_000.0]))
    assert (before.rollouts_per_problem, after.rollouts_per_problem) == (4, 16)
    assert before.reward == pytest.approx(0.3 + 0.3 / 1.4)
    assert after.reward == pytest.approx(0.3 + 0.4 / 1.5)


def test_the_envelope_never_leaves_a_cells_observed_compute() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        lows = 10.0 ** rng.uniform(2, 4, 5)
        spans = [(float(low), float(low * 10.0 ** rng.uniform(0.3, 2))) for low in lows]
        curves = [curve(2**k, 0.1 + 0.1 * k, 1e3 * 3**k, span) for k, span in enumerate(spans, start=1)]
        observed = {each.cell: (each.fit.compute_min, each.fit.compute_max) for each in curves}
        points = envelope(curves, compute_grid(curves))
        assert points
        for point in points:
            low, high = observed[point.cell]
            assert low <= point.compute_rollouts <= high
            inside = [
                c for c in curves if observed[c.cell][0] <= point.compute_rollouts <= observed[c.cell][1]
            ]
            assert point.reward >= max(float(c.fit.predict(point.compute_rollouts)) for c in inside) - 1e-12


def test_a_change_where_a_cells_observations_begin_is_no_crossing() -> None:
    late = curve(64, 0.6, 2000.0, span=(2e4, 1e5))
    points = envelope([FAST, late], compute_grid([FAST, late]))
    (change,) = crossovers([FAST, late], points)
    assert change.kind == "coverage"
    assert change.compute_rollouts == pytest.approx(2e4, rel=0.03)
    assert [p.is_contested for p in (points[0], points[-1])] == [False, True]


def test_the_grid_ends_where_the_first_complete_cell_ends() -> None:
    # A budget of 33,000: 515 steps of 64 are 32,960 and 32 steps of 1,024 are 32,768.
    small = curve(4, 0.3, 2000.0, span=(1024, 32_960))
    large = curve(64, 0.4, 5000.0, span=(1024, 32_768))
    assert compute_grid([small, large])[-1] == 32_768
    stopped_early = curve(64, 0.4, 5000.0, span=(1024, 8192))
    assert compute_grid([small, stopped_early])[-1] == 32_960


def test_a_change_of_problems_per_batch_alone_is_no_crossover_of_n() -> None:
    wide = curve(4, 0.4, 5000.0, problems=32)
    points = envelope([FAST, wide], compute_grid([FAST, wide]))
    assert {point.problems_per_batch for point in points} == {16, 32}
    assert crossovers([FAST, wide], points) == []


def test_the_short_table_lists_powers_of_two_and_the_end() -> None:
    grid = compute_grid([curve(4, 0.3, 2000.0, span=(1000, 5000))])
    assert table_budgets(grid).tolist() == [1024.0, 2048.0, 4096.0, 5000.0]
    table = frontier_table(envelope([FAST, HIGH], np.array([4096.0, 16384.0])))
    assert table["update_steps"].tolist() == [64, 64]  # 4096 / (16 * 4) and 16384 / (16 * 16)
    assert table["compared_n"].tolist() == ["4, 16", "4, 16"]


def test_no_curves_give_no_frontier() -> None:
    assert envelope([], compute_grid([])) == []
    assert table_budgets(compute_grid([])).size == 0

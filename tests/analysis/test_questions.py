"""The three questions: which a grid can ask, and their answers on curves that are known."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from analysis.fitting.curves import AllocationCurve
from analysis.fitting.frontier import frontier_points
from analysis.fitting.landscape import BestN, Landscape, best_by_n, compute_grid, landscape
from analysis.fitting.observations import Allocation, Observations
from analysis.fitting.questions import Frontier, Question, answer, constant_n, n_star, questions
from analysis.fitting.verdict import NStar
from tests.analysis.conftest import Sigmoid, curve_of, sigmoid

SHAPE: Sigmoid = (0.3, 0.6, 2000.0, 1.0)


def grid(*shapes: tuple[int, int], shape: Sigmoid = SHAPE) -> list[AllocationCurve]:
    """Curves of allocations given as (B_p, n)."""
    return [curve_of(n, shape, problems=problems) for problems, n in shapes]


def observed(curves: list[AllocationCurve], points: int = 20) -> list[Observations]:
    """The evaluations behind the curves, at common computes."""
    at = np.geomspace(1e3, 1e5, points)
    return [
        Observations(
            curve.allocation,
            curve.cells,
            curve.seeds,
            np.zeros(points, dtype=np.intp),
            at,
            at,
            curve.fit.predict(at),
            None,
        )
        for curve in curves
    ]


def answered(curves: list[AllocationCurve], question: Question) -> Frontier:
    land = landscape(curves, compute_grid(curves))
    (found,) = answer([question], land, observed(curves), 0.9)
    return found


def titles(*shapes: tuple[int, int], in_rollouts: bool = True) -> list[str]:
    return [question.title for question in questions(grid(*shapes), in_rollouts)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([], ["n, B_p and M free"]),
        ([(16, 4)], ["n, B_p and M free"]),
        ([(16, 4), (16, 8), (16, 16)], ["n, B_p and M free"]),  # one B_p: the first question is the third
        ([(16, 4), (32, 4)], ["n, B_p and M free"]),  # one n: nothing to choose at a fixed B_p or B
        ([(16, 4), (16, 8), (32, 4)], ["n, B_p and M free", "B_p = 16", "B = 128"]),
        ([(16, 8), (32, 4)], ["n, B_p and M free", "B = 128"]),
        (
            [(16, 4), (16, 8), (32, 4), (32, 8)],
            ["n, B_p and M free", "B_p = 16", "B_p = 32", "B = 128"],
        ),
    ],
)
def test_a_grid_asks_what_leaves_two_values_of_n(shapes: list[tuple[int, int]], expected: list[str]) -> None:
    assert titles(*shapes) == expected


def test_steps_at_a_fixed_batch_are_known_from_rollouts_only() -> None:
    assert titles((16, 8), (32, 4), (16, 4), in_rollouts=False) == ["n, B_p and M free", "B_p = 16"]


def test_each_question_compares_its_own_allocations_only() -> None:
    # The best of all has B_p = 32, which does not take part at B_p = 16.
    best: Sigmoid = (0.3, 0.9, 2000.0, 1.0)
    curves = [*grid((16, 4), (16, 8)), curve_of(4, best, problems=32), curve_of(8, SHAPE, problems=32)]
    free = answered(curves, Question("nothing"))
    assert {point.allocation for point in free.points} == {Allocation(4, 32)}
    at_16 = answered(curves, Question("problems_per_batch", 16))
    assert at_16.land.allocations == [Allocation(4, 16), Allocation(8, 16)]
    assert all(point.reward == pytest.approx(float(sigmoid(point.compute, *SHAPE))) for point in at_16.points)
    at_128 = answered(curves, Question("batch_rollouts", 128))
    assert set(at_128.land.allocations) == {Allocation(8, 16), Allocation(4, 32)}


def rising(batch: int = 1024) -> list[AllocationCurve]:
    """n = 2, 4, ... 64 at a fixed B. With s = 1 neighbours i and j cross at (g_j m_i - g_i m_j) / (g_i - g_j): gains 0.1, 0.2, ...
    and midpoints 100 k^4 cross at C = 100 ((k + 1)^4 k - (k + 1) k^4), which is 1400, 11400, 44400, ..."""
    shapes: dict[int, Sigmoid] = {k: (0.2, 0.2 + 0.1 * k, 100.0 * k**4, 1.0) for k in range(1, 7)}
    return [curve_of(2**k, shape, problems=batch // 2**k) for k, shape in shapes.items()]


def test_a_fixed_batch_answers_in_steps_and_in_log_steps() -> None:
    found = answered(rising(), Question("batch_rollouts", 1024))
    crossings = [100 * ((k + 1) ** 4 * k - (k + 1) * k**4) for k in (1, 2, 3)]
    # The first of them: 100 * (16 - 2) = 1400.
    assert crossings[0] == 1400
    assert [change.compute for change in found.changes] == pytest.approx(crossings, rel=1e-6)
    assert [(change.before, change.after) for change in found.changes] == [(2, 4), (4, 8), (8, 16)]
    # B_p* = B / n*.
    assert all(point.problems_per_batch * point.rollouts_per_problem == 1024 for point in found.points)
    linear = found.law_in_steps
    assert linear is not None and linear.fit is not None and found.law.fit is not None
    assert (linear.fit.axis, found.law.fit.axis) == ("linear", "log10")
    for steps in (5.0, 80.0):
        near = min(found.points, key=lambda point: abs(point.compute / 1024 - steps))
        assert float(linear.fit.predict(steps)) == pytest.approx(near.rollouts_per_problem, rel=0.5)


def test_other_questions_have_no_law_in_steps() -> None:
    assert answered(rising(), Question("nothing")).law_in_steps is None


def landscape_of(curves: list[AllocationCurve]) -> Landscape:
    return landscape(curves, compute_grid(curves))


def stars_of(land: Landscape, groups: list[Observations]) -> NStar:
    best = best_by_n(land)
    return n_star(land, best, frontier_points(land, best, 0.9), groups, 0.9)


def test_the_law_sees_contested_computes_only() -> None:
    alone = curve_of(4, SHAPE, span=(1e3, 1e5))
    late = curve_of(16, (0.3, 0.7, 5000.0, 1.0), span=(1e4, 1e5))
    land = landscape_of([alone, late])
    found = stars_of(land, observed([alone, late]))
    assert 10 ** found.x.min() >= 1e4
    assert found.grid_n == (4, 16)
    assert set(found.log2_n) <= {2.0, 4.0}


def test_common_computes_count_once_however_many_allocations_were_evaluated_there() -> None:
    curves = grid((16, 4), (16, 8), (16, 16))
    land = landscape_of(curves)
    assert stars_of(land, observed(curves, points=20)).evaluations == 20
    others = observed(grid((32, 64)), points=33)  # not of this landscape
    assert stars_of(land, [*observed(curves, points=20), *others]).evaluations == 20


def test_the_largest_n_of_a_ragged_grid_is_its_edge_where_it_leads() -> None:
    best: Sigmoid = (0.3, 0.9, 2000.0, 1.0)
    # B_max = 512: n = 32 exists at B_p = 16 only.
    shapes = [(16, 8), (16, 16), (16, 32), (32, 8), (32, 16)]

    def edge(leader: tuple[int, int]) -> Allocation | None:
        curves = [curve_of(n, best if (p, n) == leader else SHAPE, problems=p) for p, n in shapes]
        land = landscape_of(curves)
        return stars_of(land, observed(curves)).edge

    assert edge((16, 32)) == Allocation(32, 16)
    assert edge((32, 16)) == Allocation(16, 32), "B_max is why 32 problems were not tried with n = 32"
    assert edge((16, 16)) is None
    assert edge((32, 8)) is None


def test_an_n_that_every_compute_leaves_possible_is_listed() -> None:
    drawn = 0.02 * np.random.default_rng(0).standard_normal(500)
    curves = [
        curve_of(4, SHAPE, replicates=drawn),
        curve_of(8, SHAPE, replicates=drawn),
        curve_of(16, (0.3, 0.4, 2000.0, 1.0), replicates=drawn),
    ]
    land = landscape_of(curves)
    assert stars_of(land, observed(curves)).unrejected_n == (4, 8)


def best_of(reward: NDArray[np.float64], sd: float, seed: int, replicates: int = 400) -> BestN:
    """Rewards (n, G) of n = 4, 8, ... with independent noise."""
    noise = sd * np.random.default_rng(seed).standard_normal((*reward.shape, replicates))
    return BestN(tuple(4 * 2**k for k in range(len(reward))), reward, reward[:, :, None] + noise)


def test_of_equally_good_n_each_is_rejected_as_often_as_the_level_says() -> None:
    rng = np.random.default_rng(1)
    kept = [
        constant_n(best_of(0.5 + 0.02 * rng.standard_normal((4, 5)), 0.02, study), 0.9)
        for study in range(300)
    ]
    # Four values of n in 300 studies; the standard error of the share is about 0.01.
    assert sum(len(found or ()) for found in kept) / 1200 == pytest.approx(0.9, abs=0.035)


def test_equal_curves_all_stay_possible() -> None:
    assert constant_n(best_of(np.full((3, 5), 0.5), 0.02, 0), 0.9) == (4, 8, 16)


def test_an_n_far_behind_at_one_compute_is_rejected() -> None:
    reward = np.full((3, 5), 0.5)
    reward[1, 3] -= 0.2  # ten standard deviations
    assert constant_n(best_of(reward, 0.02, 0), 0.9) == (4, 16)


def test_replicates_that_lie_off_their_estimate_do_not_move_the_threshold() -> None:
    reward = np.full((3, 5), 0.5)
    reward[1, 3] -= 0.2
    best = best_of(reward, 0.02, 0)
    assert best.replicates is not None
    for row in range(3):
        moved = best.replicates.copy()
        moved[row] += 0.3
        assert constant_n(replace(best, replicates=moved), 0.9) == (4, 16)

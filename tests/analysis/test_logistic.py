"""Bounded logistics by least squares: the optimum is global, and what rests on a bound is named."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import least_squares

from analysis.fitting.logistic import Limits, fit_logistics, on_bounds

Floats = NDArray[np.float64]
LIMITS = Limits(floor=0.0, cap=1.0, middle=(1.0, 7.5), slope=(0.23, 23.0))


def curve(x: Floats, low: float, high: float, middle: float, slope: float) -> Floats:
    """Written apart from the package's own."""
    return low + (high - low) / (1 + np.exp(-np.clip(slope * (x - middle), -700, 700)))


def multistart_sse(x: Floats, y: Floats, w: Floats, rng: np.random.Generator, starts: int = 8) -> float:
    """The smallest weighted sum of squares that scipy finds within LIMITS, from many starting values.

    The levels are low = a and high = a + b (1 - a), so that a and b in [0, 1] hold all of 0 <= low <= high <= 1.
    """

    def residuals(p: Floats) -> Floats:
        return np.sqrt(w) * (curve(x, p[0], p[0] + p[1] * (1 - p[0]), p[2], np.exp(p[3])) - y)

    lower = np.array([0, 0, LIMITS.middle[0], np.log(LIMITS.slope[0])])
    upper = np.array([1, 1, LIMITS.middle[1], np.log(LIMITS.slope[1])])
    best = np.inf
    for index in range(starts):
        start = rng.uniform(lower, upper)
        if index % 2:  # steep curves are found from a middle among the points only
            start[2], start[3] = rng.choice(x[np.isfinite(x)]), rng.uniform(1.0, 3.0)
        fit = least_squares(
            residuals,
            np.clip(start, lower + 1e-6, upper - 1e-6),
            bounds=(lower, upper),
            ftol=1e-10,
            xtol=1e-10,
        )
        best = min(best, 2 * fit.cost)
    return best


def noisy_sigmoid(x: Floats, rng: np.random.Generator) -> Floats:
    return curve(x, 0.3, 0.7, rng.uniform(3, 6), rng.uniform(1, 8)) + 0.04 * rng.normal(size=len(x))


def step(x: Floats, rng: np.random.Generator) -> Floats:
    return np.where(x > rng.uniform(3.8, 5.7), 0.6, 0.3) + 0.02 * rng.normal(size=len(x))


def flat(x: Floats, rng: np.random.Generator) -> Floats:
    return 0.5 + 0.03 * rng.normal(size=len(x))


def falling(x: Floats, rng: np.random.Generator) -> Floats:
    return 0.7 - 0.1 * (x - 3) + 0.02 * rng.normal(size=len(x))


def past_the_cap(x: Floats, rng: np.random.Generator) -> Floats:
    return np.minimum(0.2 + 0.3 * (x - 3) + 0.02 * rng.normal(size=len(x)), 1.0)


def near_the_floor(x: Floats, rng: np.random.Generator) -> Floats:
    return np.maximum(0.3 * (x - 4.5) + 0.02 * rng.normal(size=len(x)), 0.0)


@pytest.mark.parametrize("shape", [noisy_sigmoid, step, flat, falling, past_the_cap, near_the_floor])
@pytest.mark.parametrize("points", [5, 20])
def test_no_start_of_a_local_optimiser_finds_a_better_fit(
    shape: Callable[[Floats, np.random.Generator], Floats], points: int
) -> None:
    rng = np.random.default_rng(points)
    for with_base in (False, True):
        x = np.sort(rng.uniform(3.0, 6.5, points))
        y = shape(x, rng)
        if with_base:
            x, y = np.append(x, -np.inf), np.append(y, np.clip(y[0], 0, 1))
        w = np.exp(rng.normal(size=len(x)))
        fit = fit_logistics(x, y[:, None], w[:, None], LIMITS, starts=6)
        values = (fit.low[0], fit.high[0], fit.middle[0], fit.slope[0])
        sse = float(w @ (curve(x, *values) - y) ** 2)
        assert fit.sse[0] == pytest.approx(sse, rel=1e-9)
        # A fit with two levels on their bounds may stop before the last digits, and must say so.
        excess = 1e-6 if fit.converged[0] else 1e-3
        assert sse <= multistart_sse(x, y, w, rng) * (1 + excess) + 1e-12
        assert fit.converged[0] or shape is near_the_floor
        assert 0.0 <= fit.low[0] <= fit.high[0] <= 1.0 + 1e-12


@pytest.mark.parametrize(
    "truth", [(0.3, 0.7, 4.5, 3.0), (0.0, 1.0, 5.0, 1.5), (0.1, 0.4, 3.6, 8.0), (0.44, 0.66, 5.5, 2.0)]
)
def test_points_without_noise_give_back_the_curve(truth: tuple[float, float, float, float]) -> None:
    x = np.linspace(3.0, 6.5, 15)
    fit = fit_logistics(x, curve(x, *truth)[:, None], np.ones((15, 1)), LIMITS)
    assert fit.converged[0]
    assert (fit.low[0], fit.high[0], fit.middle[0], fit.slope[0]) == pytest.approx(truth, abs=1e-4)


def test_a_point_at_minus_infinity_is_an_observation_of_low() -> None:
    x = np.append(np.linspace(4.0, 6.0, 10), -np.inf)
    y = np.append(curve(x[:-1], 0.2, 0.8, 4.0, 2.0), 0.2)
    fit = fit_logistics(x, y[:, None], np.ones((11, 1)), LIMITS)
    assert fit.low[0] == pytest.approx(0.2, abs=1e-5)
    assert fit.predict([-np.inf])[0, 0] == pytest.approx(0.2, abs=1e-5)


def test_many_data_sets_at_once_are_fitted_as_each_alone() -> None:
    rng = np.random.default_rng(4)
    x = np.linspace(3.0, 6.5, 20)
    y = np.stack([shape(x, rng) for shape in (noisy_sigmoid, step, flat, falling, past_the_cap) * 4], axis=1)
    w = np.exp(rng.normal(size=y.shape))
    together = fit_logistics(x, y, w, LIMITS, starts=6)
    for index in range(y.shape[1]):
        alone = fit_logistics(x, y[:, [index]], w[:, [index]], LIMITS, starts=6)
        assert together.sse[index] == pytest.approx(alone.sse[0], rel=1e-9)
        assert together.predict(x)[:, index] == pytest.approx(alone.predict(x)[:, 0], abs=1e-6)


def test_a_weight_counts_as_that_many_copies_of_a_point() -> None:
    rng = np.random.default_rng(5)
    x = np.linspace(3.0, 6.5, 12)
    y = noisy_sigmoid(x, rng)
    copies = rng.integers(0, 4, 12)
    weighted = fit_logistics(x, y[:, None], copies[:, None].astype(float), LIMITS, starts=6)
    repeated = np.repeat(y, copies)[:, None]
    stacked = fit_logistics(np.repeat(x, copies), repeated, np.ones_like(repeated), LIMITS, starts=6)
    assert weighted.predict(x) == pytest.approx(stacked.predict(x), abs=1e-6)


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ((0.3, 0.7, 4.5, 3.0), {}),
        ((0.0, 0.7, 4.5, 3.0), {"low": "lower"}),
        ((0.3, 1.0, 4.5, 3.0), {"high": "upper"}),
        ((0.0, 1.0, 4.5, 3.0), {"low": "lower", "high": "upper"}),
        ((0.3, 0.7, 4.5, 1000.0), {"slope": "upper"}),
    ],
)
def test_what_rests_on_a_bound_is_named(
    truth: tuple[float, float, float, float], expected: dict[str, str]
) -> None:
    x = np.linspace(3.0, 6.5, 71)
    fit = fit_logistics(x, curve(x, *truth)[:, None], np.ones((71, 1)), LIMITS)
    assert on_bounds(fit, LIMITS) == [expected]


def test_points_that_start_to_rise_at_the_end_put_the_middle_on_its_bound() -> None:
    limits = Limits(floor=0.0, cap=1.0, middle=(3.0, 6.0), slope=(0.23, 23.0))
    x = np.linspace(3.0, 6.0, 40)
    fit = fit_logistics(x, curve(x, 0.1, 0.9, 6.8, 4.0)[:, None], np.ones((40, 1)), limits, starts=6)
    assert on_bounds(fit, limits)[0]["middle"] == "upper"


def test_falling_points_have_no_gain() -> None:
    x = np.linspace(3.0, 6.5, 8)
    fit = fit_logistics(x, np.linspace(0.6, 0.4, 8)[:, None], np.ones((8, 1)), LIMITS)
    assert on_bounds(fit, LIMITS)[0]["gain"] == "lower"
    assert fit.predict(x)[:, 0] == pytest.approx(0.5, abs=1e-6)


def test_data_sets_are_picked_by_index() -> None:
    x = np.linspace(3.0, 6.5, 10)
    y = np.stack([curve(x, 0.1 * k, 0.5 + 0.1 * k, 4.5, 3.0) for k in range(4)], axis=1)
    fit = fit_logistics(x, y, np.ones((10, 1)), LIMITS)
    assert fit[np.array([2, 0])].low == pytest.approx([0.2, 0.0], abs=1e-4)

"""Record-breaking points and isotonic regression, against examples worked out by hand."""

import numpy as np
import pytest

from analysis.fitting.records import isotonic_curve, record_breaking


@pytest.mark.parametrize(
    ("reward", "bin_width", "expected"),
    [
        ([0.1, 0.3, 0.2, 0.4, 0.4, 0.5], 0.1, [0, 1, 3, 5]),
        ([0.10, 0.14, 0.19, 0.21], 0.1, [0, 3]),  # bins 1, 1, 1, 2
        ([0.10, 0.14, 0.19, 0.21], 0.05, [0, 2, 3]),  # bins 2, 2, 3, 4
        ([0.9, 0.8, 0.7], 0.01, [0]),
        ([0.28, 0.29, 0.30], 0.01, [0, 1, 2]),  # 0.29 / 0.01 is just below 29 in floating point
        ([], 0.01, []),
    ],
)
def test_a_record_is_the_first_point_in_a_higher_bin(
    reward: list[float], bin_width: float, expected: list[int]
) -> None:
    assert record_breaking(reward, bin_width).tolist() == expected


def test_smoothing_keeps_a_lucky_evaluation_from_breaking_a_record() -> None:
    # Averages with weight 1/2 of the past: 0.2, 0.5, 0.35, 0.375, 0.4375.
    reward = [0.2, 0.8, 0.2, 0.4, 0.5]
    assert record_breaking(reward, 0.1).tolist() == [0, 1]
    # Weight 0.8: 0.2, 0.32, 0.296, 0.3168, 0.35344 in bins of 0.02 are 10, 16, 14, 15, 17.
    assert record_breaking(reward, 0.02, smoothing=0.8).tolist() == [0, 1, 4]


def test_isotonic_regression_pools_what_falls() -> None:
    # 0.5 and 0.3 are pooled to 0.4 at equal weights; with weights 1 and 3 to (0.5 + 3 * 0.3) / 4 = 0.35.
    at, reward = np.array([3.0, 4.0, 5.0, 6.0]), np.array([0.2, 0.5, 0.3, 0.6])
    even = isotonic_curve(at, reward, np.ones(4))
    assert even.reward == pytest.approx([0.2, 0.4, 0.4, 0.6])
    uneven = isotonic_curve(at, reward, np.array([1.0, 1.0, 3.0, 1.0]))
    assert uneven.reward == pytest.approx([0.2, 0.35, 0.35, 0.6])


def test_an_isotonic_curve_is_linear_in_log_compute_between_points_and_level_outside() -> None:
    curve = isotonic_curve(np.array([3.0, 4.0]), np.array([0.2, 0.6]), np.ones(2))
    assert curve.predict([1.0, 1e3, 10**3.5, 1e4, 1e9]) == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])

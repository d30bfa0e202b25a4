"""Sigmoids of reward in compute."""

import numpy as np
import pandas as pd
import pytest

from analysis.curves import fit_cells, fit_curve

COMPUTE = 1000.0 * 2.0 ** np.arange(8)


@pytest.mark.parametrize(
    ("r0", "a", "mid", "s"), [(0.30, 0.70, 8e3, 1.0), (0.05, 0.35, 3e4, 1.6), (0.44, 0.66, 4e3, 0.7)]
)
def test_known_parameters_are_recovered(r0: float, a: float, mid: float, s: float) -> None:
    reward = r0 + (a - r0) / (1 + (mid / COMPUTE) ** s)
    fit = fit_curve(COMPUTE, reward, base_reward=r0)
    assert fit.converged
    assert fit.on_bound == ()
    assert (fit.start, fit.ceiling, fit.steepness) == pytest.approx((r0, a, s), abs=2e-3)
    assert fit.midpoint == pytest.approx(mid, rel=0.02)
    assert fit.rmse < 1e-5
    assert (fit.points, fit.compute_min, fit.compute_max) == (8, 1000.0, 128_000.0)


def test_a_curve_at_its_midpoint_has_half_its_gain() -> None:
    fit = fit_curve(COMPUTE, 0.2 + 0.6 / (1 + 8e3 / COMPUTE))
    assert float(fit.predict(fit.midpoint)) == pytest.approx((fit.start + fit.ceiling) / 2, abs=1e-9)
    assert float(fit.predict(0.0)) == pytest.approx(fit.start)


def test_the_base_model_fixes_the_start_that_late_points_leave_open() -> None:
    late = COMPUTE[4:]
    reward = 0.3 + 0.4 / (1 + 3e3 / late)
    assert fit_curve(late, reward, base_reward=0.3).start == pytest.approx(0.3, abs=0.01)


def test_a_falling_reward_gives_a_level_curve_and_a_large_residual() -> None:
    reward = np.linspace(0.6, 0.4, len(COMPUTE))
    fit = fit_curve(COMPUTE, reward)
    assert fit.predict([1000.0, 128_000.0]) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert fit.rmse == pytest.approx(float(reward.std()), rel=1e-3)


def test_a_reward_that_heads_past_one_rests_on_the_ceiling() -> None:
    fit = fit_curve(COMPUTE, np.linspace(0.2, 0.9, len(COMPUTE)))
    assert fit.ceiling <= 1.0
    assert "A at 1" in fit.on_bound


def test_noisy_curves_stay_monotone_and_bounded() -> None:
    rng = np.random.default_rng(1)
    dense = np.geomspace(1.0, 1e9, 500)
    for _ in range(10):
        fit = fit_curve(COMPUTE, np.clip(rng.normal(0.5, 0.2, len(COMPUTE)), 0, 1))
        predicted = fit.predict(dense)
        assert (np.diff(predicted) >= -1e-12).all()
        assert 0.0 <= fit.start < fit.ceiling <= 1.0


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="3 points"):
        fit_curve(COMPUTE[:3], [0.1, 0.2, 0.3])


def table(cell: str, n: int, reward: list[float | None]) -> pd.DataFrame:
    shape = {"cell": cell, "problems_per_batch": 16, "rollouts_per_problem": n, "seed": 0}
    return pd.DataFrame(
        [
            shape | {"step": step + 1, "compute_rollouts": (step + 1) * 16 * n, "avg_at_4": value}
            for step, value in enumerate(reward)
        ]
    )


def test_cells_with_fewer_than_four_usable_points_are_named_and_not_fitted() -> None:
    history = pd.concat(
        [
            table("bp16-n16-s0", 16, [0.3, 0.4, 0.45, 0.5]),
            table("bp16-n4-s0", 4, [0.3, 0.4, 0.45, 0.5, 0.52]),
            table("bp16-n64-s0", 64, [0.3, None, float("nan"), 0.4, 0.5]),
        ]
    )
    curves, unfitted = fit_cells(history, "avg_at_4")
    assert [curve.cell for curve in curves] == ["bp16-n4-s0", "bp16-n16-s0"]
    assert curves[1].batch_rollouts == 256
    assert unfitted == {"bp16-n64-s0": "3 usable points of avg_at_4; a curve needs at least 4"}

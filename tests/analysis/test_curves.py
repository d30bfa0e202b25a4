"""Sigmoids of reward in compute, of allocations and of single cells."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import curve_fit, least_squares

from analysis.fitting.curves import AllocationCurve, fit_allocations, fit_cells, fit_curve
from analysis.fitting.observations import BasePoint, Observations, observe
from analysis.fitting.resampling import plan_resampling
from analysis.options import FitOptions
from tests.analysis.conftest import cell_rows, sigmoid

COMPUTE = 1000.0 * 2.0 ** np.arange(8)
SHAPE = (0.3, 0.7, 8e3, 1.0)


def groups_of(*cells: pd.DataFrame, metric: str = "avg_at_4") -> list[Observations]:
    groups, unfitted = observe(
        pd.concat(cells, ignore_index=True), metric, "compute_rollouts", with_scores=True
    )
    assert unfitted == {}
    return groups


def fitted(
    groups: list[Observations], base: BasePoint | None = None, replicates: int = 0
) -> list[AllocationCurve]:
    plan = plan_resampling(groups, replicates, seed=0)
    return fit_allocations(groups, base, FitOptions(replicates=replicates), plan)


@pytest.mark.parametrize(
    ("r0", "a", "mid", "s"), [(0.30, 0.70, 8e3, 1.0), (0.05, 0.35, 3e4, 1.6), (0.44, 0.66, 4e3, 0.7)]
)
def test_known_parameters_are_recovered(r0: float, a: float, mid: float, s: float) -> None:
    fit = fit_curve(COMPUTE, sigmoid(COMPUTE, r0, a, mid, s), base_reward=r0)
    assert fit.converged
    assert fit.on_bound == ()
    assert (fit.start, fit.ceiling, fit.steepness) == pytest.approx((r0, a, s), abs=2e-3)
    assert fit.midpoint == pytest.approx(mid, rel=0.02)
    assert fit.rmse < 1e-5
    assert (fit.points, fit.compute_min, fit.compute_max) == (8, 1000.0, 128_000.0)


def test_a_curve_at_its_midpoint_has_half_its_gain() -> None:
    fit = fit_curve(COMPUTE, sigmoid(COMPUTE, 0.2, 0.8, 8e3, 1.0))
    assert float(fit.predict(fit.midpoint)) == pytest.approx((fit.start + fit.ceiling) / 2, abs=1e-9)
    assert float(fit.predict(0.0)) == pytest.approx(fit.start)


def test_observed_compute_ends_with_the_evaluations() -> None:
    fit = fit_curve(COMPUTE, sigmoid(COMPUTE, *SHAPE))
    assert fit.observes([999.0, 1000.0, 128_000.0, 128_001.0]).tolist() == [False, True, True, False]


def test_the_base_model_fixes_the_start_that_late_points_leave_open() -> None:
    late = COMPUTE[4:]
    reward = 0.3 + 0.4 / (1 + 3e3 / late)
    assert fit_curve(late, reward, base_reward=0.3).start == pytest.approx(0.3, abs=0.01)


def test_a_falling_reward_gives_a_level_curve_and_a_large_residual() -> None:
    reward = np.linspace(0.6, 0.4, len(COMPUTE))
    fit = fit_curve(COMPUTE, reward)
    assert fit.predict([1000.0, 128_000.0]) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert fit.rmse == pytest.approx(float(reward.std()), rel=1e-3)
    assert "A at R0 (no gain)" in fit.on_bound


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
        assert 0.0 <= fit.start <= fit.ceiling <= 1.0


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="3 points"):
        fit_curve(COMPUTE[:3], [0.1, 0.2, 0.3])


def test_points_are_weighted_by_the_inverse_variance_of_a_share() -> None:
    # Scores from near 0 to near 1, with errors that pull a fit of equal weights elsewhere.
    rng = np.random.default_rng(2)
    reward = np.clip(sigmoid(COMPUTE, 0.03, 0.97, 1e4, 1.2) + rng.normal(0, 0.04, 8), 0.001, 0.999)

    def best(weights: np.ndarray) -> np.ndarray:
        def residuals(p: np.ndarray) -> np.ndarray:
            model = sigmoid(COMPUTE, p[0], p[0] + p[1] * (1 - p[0]), 10 ** p[2], p[3])
            return np.sqrt(weights) * (model - reward)

        bounds = ([0, 0, 2, 0.1], [1, 1, 6, 10])
        p = least_squares(residuals, [0.1, 0.9, 4.0, 1.0], bounds=bounds, xtol=1e-12, ftol=1e-12).x
        return sigmoid(COMPUTE, p[0], p[0] + p[1] * (1 - p[0]), 10 ** p[2], p[3])

    even = best(np.ones(8))
    expected = best(1 / np.maximum(even * (1 - even), 0.02 * 0.98))
    assert np.abs(expected - even).max() > 0.003, "the weights matter in this example"
    assert fit_curve(COMPUTE, reward).predict(COMPUTE) == pytest.approx(expected, abs=1e-4)


def test_seeds_of_an_allocation_share_the_curve_of_all_their_points() -> None:
    rng = np.random.default_rng(3)
    cells = [cell_rows(16, SHAPE, seed=seed, draw=rng) for seed in range(3)]
    (curve,) = fitted(groups_of(*cells))
    stacked = pd.concat(cells)
    alone = fit_curve(stacked["compute_rollouts"], stacked["avg_at_4"])
    assert curve.cells == ("bp16-n16-s0", "bp16-n16-s1", "bp16-n16-s2")
    assert curve.fit.points == len(stacked)
    assert curve.fit.predict(COMPUTE) == pytest.approx(alone.predict(COMPUTE), abs=1e-5)
    assert curve.fit.rmse == pytest.approx(alone.rmse, rel=1e-4)


def test_seeds_evaluated_at_different_computes_share_a_curve_too() -> None:
    early = cell_rows(16, SHAPE, seed=0, marks=COMPUTE[:5])
    late = cell_rows(16, SHAPE, seed=1, marks=1.4 * COMPUTE[3:])
    (curve,) = fitted(groups_of(early, late), BasePoint(0.3, None))
    at = np.geomspace(1024, 150_000, 9)
    assert curve.fit.predict(at) == pytest.approx(sigmoid(at, *SHAPE), abs=1e-4)
    assert curve.fit.compute_max == late["compute_rollouts"].max()


def test_the_only_cell_of_an_allocation_has_the_allocations_curve() -> None:
    groups = groups_of(cell_rows(16, SHAPE, draw=np.random.default_rng(4)))
    (curve,) = fitted(groups)
    fits = fit_cells(groups, None)
    assert fits.keys() == {"bp16-n16-s0"}
    assert fits["bp16-n16-s0"].predict(COMPUTE) == pytest.approx(curve.fit.predict(COMPUTE), abs=1e-9)


def test_cells_fitted_in_one_go_are_fitted_as_each_alone() -> None:
    rng = np.random.default_rng(5)
    cells = [cell_rows(16, SHAPE, seed=seed, draw=rng) for seed in range(4)]
    fits = fit_cells(groups_of(*cells), BasePoint(0.3, None))
    for seed, cell in enumerate(cells):
        alone = fit_curve(cell["compute_rollouts"], cell["avg_at_4"], base_reward=0.3)
        assert fits[f"bp16-n16-s{seed}"].predict(COMPUTE) == pytest.approx(alone.predict(COMPUTE), abs=1e-6)


def test_the_record_curve_holds_the_record_breaking_points_only() -> None:
    # Every second evaluation is a dip that breaks no record; the others lie on a known curve.
    cell = cell_rows(4, (0.1, 0.9, 8e3, 1.0))
    truth = cell["avg_at_4"].copy()
    cell.loc[1::2, "avg_at_4"] = 0.05
    (curve,) = fitted(groups_of(cell))
    assert curve.by_records is not None
    assert curve.by_records.predict(cell["compute_rollouts"][::2]) == pytest.approx(truth[::2], abs=1e-3)
    assert curve.fit.predict(1e5) < 0.7
    assert curve.by_records.compute_max == cell["compute_rollouts"].max(), "dips were observed too"


def test_too_few_records_give_no_record_curve() -> None:
    (curve,) = fitted(groups_of(cell_rows(4, SHAPE).assign(avg_at_4=0.5)))
    assert curve.by_records is None


def test_the_isotonic_curve_goes_through_points_that_rise() -> None:
    cell = cell_rows(4, SHAPE)
    (curve,) = fitted(groups_of(cell))
    assert curve.isotonic.predict(cell["compute_rollouts"]) == pytest.approx(cell["avg_at_4"].to_numpy())


def test_replicates_that_draw_nothing_anew_are_the_curve_itself() -> None:
    groups = groups_of(cell_rows(16, SHAPE, draw=np.random.default_rng(6), validation_problems=40))
    plan = plan_resampling(groups, 5, seed=0)
    assert plan is not None
    even = replace(plan, problem_weights=np.full((40, 5), 1 / 40))
    (curve,) = fit_allocations(groups, None, FitOptions(), even)
    assert curve.predict_replicates(COMPUTE) == pytest.approx(
        np.tile(curve.fit.predict(COMPUTE)[:, None], 5), abs=1e-6
    )


@pytest.mark.parametrize("column", ["compute_rollouts", "compute_tokens"])
@pytest.mark.parametrize("levels", [(0.4, 0.5), (0.40, 0.46, 0.43), (0.3, 0.5, 0.45, 0.35, 0.6)])
def test_seeds_drawn_anew_spread_a_level_curve_by_the_standard_error_of_their_mean(
    levels: tuple[float, ...], column: str
) -> None:
    # No two seeds have evaluations at the same number of tokens.
    cells = []
    for seed, level in enumerate(levels):
        cell = cell_rows(16, SHAPE, seed=seed).assign(avg_at_4=level)
        cells.append(cell.assign(compute_tokens=cell["compute_rollouts"] * (900 + 7 * seed)))
    groups, _ = observe(pd.concat(cells), "avg_at_4", column, with_scores=True)
    (curve,) = fitted(groups, replicates=2000)
    middle = float(np.median(groups[0].compute))
    spread = curve.predict_replicates([middle])[0].std()
    # s / sqrt(S), which is |x1 - x2| / 2 for two seeds; Monte Carlo error 1.6 %.
    expected = np.std(levels, ddof=1) / np.sqrt(len(levels))
    if len(levels) == 2:
        assert expected == pytest.approx(0.05)
    assert spread == pytest.approx(expected, rel=0.08)
    assert curve.fit.predict(middle) == pytest.approx(np.mean(levels), abs=2e-3)


def test_an_evaluation_of_one_seed_alone_still_has_the_spread_of_seeds() -> None:
    cells = [cell_rows(16, SHAPE, seed=seed).assign(avg_at_4=0.4 + 0.1 * seed) for seed in range(2)]
    cut = pd.concat([cells[0], cells[1].iloc[:-4]])
    groups, _ = observe(cut, "avg_at_4", "compute_rollouts", with_scores=True)
    (curve,) = fitted(groups, replicates=500)
    at_the_end = curve.predict_replicates([curve.fit.compute_max])[0].std()
    assert at_the_end > 0.02


def test_problems_drawn_anew_spread_a_level_curve_by_the_standard_error_of_a_mean() -> None:
    # Each problem has one score at all marks, so the curve is level at the mean over problems.
    rng = np.random.default_rng(7)
    right = rng.integers(0, 5, 60)
    cell = cell_rows(16, SHAPE).assign(avg_at_4=right.mean() / 4)
    cell["eval_right"] = [right] * len(cell)
    (curve,) = fitted(groups_of(cell), replicates=1000)
    spread = curve.predict_replicates([2e4])[0].std()
    # sd / sqrt(P); the Monte Carlo error of a standard deviation over 1,000 replicates is 2.2 %.
    assert spread == pytest.approx((right / 4).std() / np.sqrt(60), rel=0.08)


def test_an_allocation_that_is_added_leaves_the_others_as_they_were() -> None:
    rng = np.random.default_rng(8)
    cells = [cell_rows(n, SHAPE, draw=rng, validation_problems=30) for n in (4, 16)]
    (before,) = fitted(groups_of(cells[0]), replicates=30)
    after, _ = fitted(groups_of(*cells), replicates=30)
    assert np.array_equal(before.predict_replicates(COMPUTE), after.predict_replicates(COMPUTE))
    assert before.fit == after.fit


def test_what_no_sigmoid_can_fit_is_no_spread_between_seeds_that_agree() -> None:
    wave = 0.5 + 0.2 * np.sin(np.arange(len(cell_rows(16, SHAPE))))
    cells = [cell_rows(16, SHAPE, seed=seed).assign(avg_at_4=wave) for seed in range(2)]
    (curve,) = fitted(groups_of(*cells), replicates=50)
    assert curve.fit.rmse > 0.05
    assert curve.predict_replicates(COMPUTE).std(axis=1).max() < 1e-9


def test_a_mark_of_several_seeds_pulls_as_several_points() -> None:
    # Three seeds at the early marks, one of them alone at the late ones.
    rng = np.random.default_rng(9)
    cells = [cell_rows(16, SHAPE, seed=seed, marks=COMPUTE[: (8, 4, 4)[seed]]) for seed in range(3)]
    cells = [cell.assign(avg_at_4=cell["avg_at_4"] + rng.normal(0, 0.06, len(cell))) for cell in cells]
    stacked = pd.concat(cells)
    compute, reward = (stacked[name].to_numpy(dtype=float) for name in ("compute_rollouts", "avg_at_4"))
    (curve,) = fitted(groups_of(*cells))

    def scipys(at: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Its rewards at COMPUTE: points of equal weight first, then of the inverse variance of a share."""

        def model(c: np.ndarray, r0: float, gain: float, log_mid: float, s: float) -> np.ndarray:
            return np.asarray(sigmoid(c, r0, r0 + gain * (1 - r0), 10**log_mid, s))

        def fit(sd: np.ndarray) -> np.ndarray:
            bounds = ([0, 0, 1, 0.1], [1, 1, 6, 10])
            found, _ = curve_fit(model, at, scores, (0.3, 0.6, 4.0, 1.0), sd, bounds=bounds, xtol=1e-12)
            return np.asarray(found)

        share = model(at, *fit(np.ones(len(at))))
        return model(COMPUTE, *fit(np.sqrt(share * (1 - share))))

    expected = scipys(compute, reward)
    means = stacked.groupby("compute_rollouts")["avg_at_4"].mean()
    one_a_mark = scipys(means.index.to_numpy(dtype=float), means.to_numpy())
    assert np.abs(expected - one_a_mark).max() > 0.005, "the counts matter in this example"
    assert curve.fit.predict(COMPUTE) == pytest.approx(expected, abs=3e-4)

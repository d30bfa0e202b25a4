"""Sensitivity of the best reward to n and B_p and the best n at each B_p, against numbers worked out by hand."""

import numpy as np
import pytest

from analysis.diagnostics.sensitivity import best_n, best_n_by_metric, range_of_noise, sensitivity

# A ragged grid: n = 32 exists at B_p = 32 only.
PROBLEMS = np.array([32, 32, 32, 64, 64, 128])
ROLLOUTS = np.array([8, 16, 32, 8, 16, 8])
REWARD = np.array([0.50, 0.54, 0.60, 0.53, 0.55, 0.52])[:, None]


def test_sensitivities_are_ranges_in_points() -> None:
    found = sensitivity(PROBLEMS, ROLLOUTS, REWARD)
    # At B_p = 32: 0.60 - 0.50; at 64: 0.55 - 0.53; 128 has one n.
    assert found.within_n == pytest.approx([(10 + 2) / 2])
    # At n = 8: 0.53 - 0.50; at 16: 0.55 - 0.54; 32 has one B_p.
    assert found.within_problems == pytest.approx([(3 + 1) / 2])
    # The best over B_p are 0.53, 0.55, 0.60; the best over n are 0.60, 0.55, 0.52.
    assert found.best_n == pytest.approx([7])
    assert found.best_problems == pytest.approx([8])


def test_a_ragged_grid_does_not_blame_n_for_an_effect_of_the_batch() -> None:
    # The reward depends on B_p alone.
    reward = np.array([0.40, 0.40, 0.40, 0.50, 0.50, 0.60])[:, None]
    found = sensitivity(PROBLEMS, ROLLOUTS, reward)
    assert found.within_n == pytest.approx([0.0])
    assert found.best_n == pytest.approx([20.0])


def test_every_replicate_has_its_own_sensitivity_and_holes_are_skipped() -> None:
    holed = REWARD.copy()
    holed[2] = np.nan
    found = sensitivity(PROBLEMS, ROLLOUTS, np.hstack([REWARD, holed, np.full((6, 1), np.nan)]))
    assert found.within_n[:2] == pytest.approx([6, (4 + 2) / 2])
    assert found.best_n[:2] == pytest.approx([7, 2])
    assert np.isnan([found.within_n[2], found.best_problems[2]]).all()


def test_one_n_only_has_no_sensitivity_to_n() -> None:
    found = sensitivity([32, 64], [8, 8], np.array([[0.5], [0.6]]))
    assert np.isnan(found.within_n).all() and np.isnan(found.best_n).all()
    assert found.within_problems == pytest.approx([10])


def test_a_repeated_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        sensitivity([32, 32], [8, 8], np.array([[0.5], [0.6]]))


def test_the_range_of_noise_is_the_control_chart_constant() -> None:
    assert [range_of_noise(k, 0.01) for k in (1, 2, 5, 10)] == pytest.approx(
        [0, 1.128, 2.326, 3.078], abs=1e-3
    )


def test_the_best_n_is_the_one_with_the_largest_reward_at_each_batch() -> None:
    tie = np.array([0.5, 0.5, 0.4, np.nan, 0.3, np.nan])[:, None]
    levels, found = best_n(PROBLEMS, ROLLOUTS, np.hstack([REWARD, tie]))
    assert levels.tolist() == [32, 64, 128]
    assert found[:, 0].tolist() == [32, 16, 8]
    assert found[:2, 1].tolist() == [8, 16] and np.isnan(found[2, 1])


def test_the_table_tells_the_range_of_replicates_and_the_edge_of_the_grid() -> None:
    rng = np.random.default_rng(0)
    inner = np.array([0.50, 0.60, 0.55, 0.53, 0.55, 0.52])[:, None]
    replicates = np.repeat(inner, 100, axis=1)
    replicates[0, :20] = 0.7
    replicates = replicates[:, rng.permutation(100)]
    found = best_n_by_metric(
        PROBLEMS, ROLLOUTS, {"best_at_4": np.hstack([inner, replicates]), "worst_at_4": REWARD}
    ).set_index(["metric", "problems_per_batch"])
    first = found.loc[("best_at_4", 32)]
    assert (first["best_n"], first["smallest_n"], first["largest_n"], first["on_edge"]) == (16, 8, 32, False)
    assert (first["n_low"], first["n_high"], first["agreement"]) == (8, 16, pytest.approx(0.8))
    assert found.loc[("worst_at_4", 32), "on_edge"]
    assert not found.loc[("worst_at_4", 128), "on_edge"]
    assert np.isnan(found.loc[("worst_at_4", 32), "agreement"])

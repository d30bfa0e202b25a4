"""Overfitting verdicts: how often they are wrong on simulated answers, and what they are on clear cases."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from analysis.diagnostics.overfitting import overfitting_onset, train_validation_gap

PROBLEMS, K, ROWS = 300, 4, 20


def simulate(
    truth: np.ndarray, cells: int = 1, seed: int = 0, train: np.ndarray | None = None, probe: bool = False
) -> pd.DataFrame:
    """Cells whose problems differ in difficulty around a true score in each row; ``train`` is the true training
    score, measured by the probe or as train_reward."""
    rng = np.random.default_rng(seed)
    compute = 1024 * 2 ** np.arange(len(truth))
    rows: list[dict[str, Any]] = []
    for cell in range(cells):
        ease = rng.uniform(-0.3, 0.3, PROBLEMS)
        ease -= ease.mean()
        for i, c in enumerate(compute):
            right = rng.binomial(K, truth[i] + ease)
            values: dict[str, Any] = {}
            if train is not None and probe:
                answers = rng.binomial(8, train[i], 200)
                values = {"train_probe_avg_at_8": answers.mean() / 8, "train_probe_right": answers}
            elif train is not None:
                values = {"train_reward": train[i]}
            rows.append(
                {
                    "cell": f"bp32-n8-s{cell}",
                    "problems_per_batch": 32,
                    "rollouts_per_problem": 8,
                    "seed": cell,
                    "step": c // 256,
                    "compute_rollouts": c,
                    "epochs": c / 8 / 6000,
                    "avg_at_4": right.mean() / K,
                    "best_at_4": (right > 0).mean(),
                    "worst_at_4": (right == K).mean(),
                    "eval_right": right,
                    **values,
                }
            )
    return pd.DataFrame(rows)


FLAT = np.full(ROWS, 0.5)
STEPS = np.arange(ROWS)
FALLING = 0.5 - 0.05 * np.clip(STEPS - 9, 0, None) / 10
RISING = 0.4 + 0.01 * STEPS
CRASH = np.where(STEPS < 15, 0.6, 0.4)


@pytest.mark.parametrize("metric", ["avg_at_4", "worst_at_4"])
def test_flat_truth_gives_false_alarms_at_the_stated_level(metric: str) -> None:
    found = overfitting_onset(simulate(FLAT, cells=300), metric)
    alarms = int((found["verdict"] != "no fall").sum())
    assert binom.ppf(0.001, 300, 0.05) <= alarms <= binom.ppf(0.999, 300, 0.05) < 0.1 * 300


def test_without_scores_by_problem_false_alarms_are_no_more_frequent() -> None:
    history = simulate(FLAT, cells=300).drop(columns="eval_right")
    found = overfitting_onset(history, "avg_at_4", validation_problems=PROBLEMS)
    assert set(found["noise"]) == {"binomial"}
    assert (found["verdict"] != "no fall").mean() <= 0.05


def test_a_fall_of_five_points_over_the_second_half_is_found() -> None:
    found = overfitting_onset(simulate(FALLING, cells=100, train=FLAT), "avg_at_4")
    fallen = found[found["verdict"] == "overfits"]
    assert len(fallen) >= 95
    # The bound holds at 95 %; the drop never tells more than the truth by much.
    assert (fallen["drop_at_least"] <= 0.05).mean() >= 0.95
    assert fallen["drop_at_least"].median() > 0.01
    # The fall begins after row 9 of 20.
    assert 7 <= np.log2(fallen["onset_compute"] / 1024).median() <= 11


def test_a_rising_curve_does_not_fall() -> None:
    found = overfitting_onset(simulate(RISING, cells=100), "avg_at_4")
    assert (found["verdict"] == "no fall").mean() >= 0.99


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize(("train", "verdict"), [(RISING, "overfits"), (CRASH, "collapses")])
def test_the_training_score_tells_overfitting_from_collapse(
    train: np.ndarray, verdict: str, probe: bool
) -> None:
    found = overfitting_onset(simulate(CRASH, train=train, probe=probe), "avg_at_4").iloc[0]
    assert found["verdict"] == verdict
    assert found["training"] == ("train_probe_avg_at_8" if probe else "train_reward")
    assert found["onset_compute"] == 1024 * 2**14
    assert found["onset_epochs"] == pytest.approx(1024 * 2**14 / 8 / 6000)
    assert found["drop"] == pytest.approx(0.2, abs=0.03)
    assert found["drop_at_least"] < found["drop"]
    if verdict == "collapses":
        assert found["training_change"] == pytest.approx(-0.2, abs=0.03)


def test_the_standard_error_of_a_drop_is_paired_over_problems() -> None:
    # Problem-by-problem differences between the first and the last rows: ten problems lose everything.
    early, late = np.tile([4, 0], 50), np.tile([4, 0], 50)
    late[:20:2] = 0
    history = simulate(np.full(6, 0.5)).assign(eval_right=[early] * 3 + [late] * 3)
    history["avg_at_4"] = [0.5] * 3 + [0.4] * 3
    found = overfitting_onset(history, "avg_at_4").iloc[0]
    difference = np.repeat([1.0, 0.0], [10, 90])
    assert found["drop"] == pytest.approx(0.1)
    assert found["drop_se"] == pytest.approx(difference.std(ddof=1) / 10)
    assert (found["noise"], found["verdict"]) == ("paired", "falls")


def test_a_score_that_falls_from_the_base_model_has_its_onset_at_zero() -> None:
    history = simulate(np.full(6, 0.4))
    right = np.tile([3, 2], 150)
    base = {"avg_at_4": 0.625, "eval_right": right, "compute_rollouts": 0}
    found = overfitting_onset(history, "avg_at_4", base).iloc[0]
    assert found["verdict"] == "falls"
    assert (found["onset_compute"], found["onset_epochs"]) == (0.0, 0.0)
    # A base row without scores by problem cannot be paired, and what is left is flat.
    assert overfitting_onset(history, "avg_at_4", {"avg_at_4": 0.625})["verdict"].tolist() == ["no fall"]


def test_cells_that_cannot_be_judged_say_why() -> None:
    history = simulate(CRASH)
    short = overfitting_onset(history.head(3), "avg_at_4").iloc[0]
    assert short["verdict"] == "unknown" and short["reason"] == "3 evaluated rows; a verdict needs 5"
    blind = overfitting_onset(history.drop(columns="eval_right"), "avg_at_4").iloc[0]
    assert blind["verdict"] == "unknown" and "eval_right" in blind["reason"]
    assert overfitting_onset(history, "avg_at_16").empty


def test_missing_scores_and_equal_rows_are_no_fall() -> None:
    history = simulate(FLAT)
    history.loc[3:5, "avg_at_4"] = np.nan
    assert overfitting_onset(history, "avg_at_4")["verdict"].tolist() == ["no fall"]
    same = history.head(1).loc[[0] * 5].assign(compute_rollouts=[256, 512, 1024, 2048, 4096])
    assert overfitting_onset(same, "avg_at_4")["verdict"].tolist() == ["no fall"]


def test_the_gap_is_training_minus_validation_and_prefers_the_probe() -> None:
    history = simulate(np.full(3, 0.5)).assign(
        avg_at_4=[0.5, 0.4, np.nan], train_reward=[0.6, 0.7, 0.8], train_probe_avg_at_8=[np.nan, 0.65, 0.9]
    )
    found = train_validation_gap(history, "avg_at_4")
    assert found["training_column"].tolist() == ["train_reward", "train_probe_avg_at_8"]
    assert found["gap"].tolist() == pytest.approx([0.1, 0.25])
    assert train_validation_gap(
        history.drop(columns=["train_reward", "train_probe_avg_at_8"]), "avg_at_4"
    ).empty

"""Histograms of the probe, interference, training health, tokens and epochs, against numbers worked out by hand."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.diagnostics.training import (
    epochs_at,
    interference,
    pass_rate_histograms,
    tokens_per_rollout,
    training_health,
    training_summary,
)


def row(cell: str, step: int, **values: Any) -> dict[str, Any]:
    problems, n, seed = (int(part.strip("bpns")) for part in cell.split("-"))
    return {
        "cell": cell,
        "problems_per_batch": problems,
        "rollouts_per_problem": n,
        "seed": seed,
        "step": step,
        "compute_rollouts": step * problems * n,
        "avg_at_4": 0.5,
        **values,
    }


def probe(right: list[int], answers: int = 2) -> dict[str, Any]:
    return {f"train_probe_avg_at_{answers}": np.mean(right) / answers, "train_probe_right": right}


A, B = "bp8-n4-s0", "bp8-n8-s0"


def test_a_histogram_counts_the_problems_with_each_number_of_right_answers() -> None:
    history = pd.DataFrame([row(A, 1, **probe([0, 2, 2])), row(A, 3, **probe([1, 2, 2]))])
    found = pass_rate_histograms(history, probe([0, 0, 1]))
    assert (found.answers, found.problems, found.left_out) == (2, 3, {})
    table = found.counts.set_index(["cell", "compute_rollouts", "right"])["problems"]
    assert table.loc["base", 0].tolist() == [2, 1, 0]
    assert table.loc[A, 32].tolist() == [1, 0, 2]
    assert table.loc[A, 96].tolist() == [0, 1, 2]
    assert len(table) == 9


def test_cells_with_another_number_of_answers_are_left_out_and_named() -> None:
    # Merged from two runs: each cell has its own score column, the other is NaN.
    rows = [row(A, 1, **probe([0, 2, 2])), row("bp8-n4-s1", 1, **probe([0, 1, 2]))]
    rows += [row(B, 1, **probe([0, 4, 4], answers=4)), row("bp8-n16-s0", 1, **probe([0, 1]))]
    found = pass_rate_histograms(pd.DataFrame(rows), probe([0, 0, 1], answers=4))
    assert set(found.counts["cell"]) == {A, "bp8-n4-s1"}
    assert found.answers == 2
    assert found.left_out == {
        "base": "its probe has 4 answers for each of 3 problems, not 2 for each of 3",
        B: "its probe has 4 answers for each of 3 problems, not 2 for each of 3",
        "bp8-n16-s0": "its probe has 2 answers for each of 2 problems, not 2 for each of 3",
    }


def test_interference_counts_lost_and_gained_problems_in_the_last_probed_row() -> None:
    rows = [row(A, 1, **probe([2, 2, 2, 2, 2])), row(A, 2, **probe([0, 0, 1, 2, 0])), row(A, 3)]
    base = probe([1, 2, 2, 0, 0])
    found = interference(pd.DataFrame(rows), base).iloc[0]
    assert found["compute_rollouts"] == 64
    assert (found["solved_by_base"], found["lost"], found["lost_share"]) == (3, 2, pytest.approx(2 / 3))
    assert (found["unsolved_by_base"], found["gained"], found["gained_share"]) == (2, 1, 0.5)
    # Pass rates after 1 of 2 and 2 of 2 right are Beta(2, 2) and Beta(3, 1): E[(1-p)^2] is 3/10 and 1/10.
    assert found["lost_by_chance"] == pytest.approx(0.3 + 2 * 0.1)
    # After 0 of 2: Beta(1, 3), E[(1-p)^2] = 6/10.
    assert found["gained_by_chance"] == pytest.approx(2 * 0.4)


def test_a_stricter_cut_leaves_rarely_solved_problems_out_of_interference() -> None:
    history = pd.DataFrame([row(A, 1, **probe([0, 0, 1, 2, 0]))])
    found = interference(history, probe([1, 2, 2, 0, 0]), solved_share=0.75).iloc[0]
    assert (found["solved_by_base"], found["lost"]) == (2, 1)


def test_interference_leaves_out_cells_with_another_probe_than_the_base_model() -> None:
    rows = [row(A, 1, **probe([0, 2])), row(B, 1, **probe([0, 2], answers=4))]
    assert interference(pd.DataFrame(rows), probe([1, 1]))["cell"].tolist() == [A]
    assert interference(pd.DataFrame(rows), {"avg_at_4": 0.3}).empty


def test_training_health_has_the_columns_that_hold_something() -> None:
    rows = [row(A, 1, kl=0.1, entropy=np.nan, train_reward=0.2), row(A, 2, kl=np.nan, train_reward=0.4)]
    found = training_health(pd.DataFrame(rows))
    assert found.columns.tolist()[-2:] == ["train_reward", "kl"]
    assert "entropy" not in found
    assert found["train_reward"].tolist() == [0.2, 0.4]


def test_the_summary_tells_first_last_and_extremes_with_their_compute() -> None:
    rows = [row(A, step, kl=kl) for step, kl in [(1, np.nan), (2, 0.3), (3, 0.9), (4, 0.1), (5, 0.2)]]
    rows += [row(B, step, kl=0.5, train_reward=0.1 * step) for step in (1, 2)]
    found = training_summary(pd.DataFrame(rows)).set_index(["cell", "quantity"])
    kl = found.loc[(A, "kl")]
    assert kl[["rows", "first", "last", "smallest", "largest"]].tolist() == [4, 0.3, 0.2, 0.1, 0.9]
    assert (kl["smallest_at"], kl["largest_at"]) == (4 * 32, 3 * 32)
    assert found.loc[(B, "train_reward"), "largest"] == pytest.approx(0.2)
    assert (A, "train_reward") not in found.index


def test_tokens_per_rollout_is_the_mean_answer_over_training_so_far() -> None:
    rows = [
        row(A, 1, compute_tokens=6_400),
        row(A, 2, compute_tokens=16_000),
        row(A, 3, compute_tokens=np.nan),
    ]
    assert tokens_per_rollout(pd.DataFrame(rows))["tokens_per_rollout"].tolist() == [200.0, 250.0]


def test_epochs_at_a_crossover_are_those_of_the_overtaking_n() -> None:
    # D = 100: 8 problems a step are 0.08 epochs.
    rows = [row(cell, step, epochs=step * 0.08) for cell in (A, B, "bp8-n8-s1") for step in (5, 10)]
    found = epochs_at(pd.DataFrame(rows), [(480.0, 8, 8), (128, 8, 8), (700, 8, 8), (64, 16, 8)])
    # n = 8: 64 rollouts a step, so C = 480 is step 7.5; C = 128 lies before the first row; C = 700 after the last.
    assert found["epochs"][:2].tolist() == pytest.approx([0.6, 0.16])
    assert found["epochs"][2:].isna().all()
    assert found["rollouts_per_problem"].tolist() == [8, 8, 8, 16]


def test_tables_without_the_columns_give_empty_frames() -> None:
    history = pd.DataFrame([row(A, 1)])
    nothing = pass_rate_histograms(history, {"avg_at_4": 0.3})
    assert nothing.answers is None and nothing.counts.empty
    assert interference(history, None).empty
    assert training_summary(history).empty
    assert tokens_per_rollout(history).empty
    assert epochs_at(history, [(32, 4, 8)])["epochs"].isna().all()
    assert pass_rate_histograms(history.iloc[:0]).counts.empty
    assert training_summary(history.iloc[:0]).empty

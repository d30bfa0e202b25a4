"""Scores at one common compute: which evaluations count, and what their replicates hold."""

import numpy as np
import pandas as pd
import pytest

from analysis.diagnostics.final_scores import (
    best_n_table,
    common_compute,
    fitted_scores,
    observed_scores,
    sensitivity_table,
)
from analysis.findings import Analysis, analyse
from analysis.fitting.observations import Allocation
from analysis.options import FitOptions
from tests.analysis.conftest import cell_rows, sigmoid, tables_of

LOW = (0.3, 0.5, 4000.0, 1.5)
HIGH = (0.3, 0.7, 9000.0, 1.5)
MARKS = 1024 * 2.0 ** np.arange(7)  # 1k to 64k


def rows(
    n: int, shape: tuple[float, float, float, float], problems: int = 16, **options: object
) -> pd.DataFrame:
    return cell_rows(n, shape, problems, **({"marks": MARKS} | options))  # type: ignore[arg-type]


def analysed(*cells: pd.DataFrame, replicates: int = 0, **options: object) -> Analysis:
    return analyse(tables_of(*cells), FitOptions(replicates=replicates, **options))  # type: ignore[arg-type]


def test_allocations_are_compared_where_half_of_them_got_to() -> None:
    early = rows(64, HIGH, marks=MARKS[:4])
    assert common_compute(analysed(rows(4, LOW), rows(16, LOW), early).groups) == 65536
    assert common_compute(analysed(rows(4, LOW), early, rows(16, LOW, marks=MARKS[:4])).groups) == 8192
    assert common_compute(analysed(rows(4, LOW), early).groups) == 8192
    assert common_compute(analysed(rows(4, LOW)).groups) is None


def test_a_score_is_the_mean_over_seeds_of_the_evaluations_nearest_to_the_common_compute() -> None:
    better = (0.3, 0.6, 4000.0, 1.5)
    final = observed_scores(
        analysed(rows(4, LOW), rows(4, better, seed=1), rows(16, LOW), rows(64, HIGH, marks=MARKS[:4]))
    )
    assert final is not None
    assert final.compute == 65536
    assert final.allocations == (Allocation(4, 16), Allocation(16, 16))  # n = 64 stopped three marks before
    expected = [(sigmoid(65536, *LOW) + sigmoid(65536, *better)) / 2, sigmoid(65536, *LOW)]
    assert final.scores["avg_at_4"] == pytest.approx(np.array(expected)[:, None])


def test_only_the_seeds_that_got_there_count() -> None:
    final = observed_scores(
        analysed(rows(4, LOW), rows(4, HIGH, seed=1, marks=MARKS[:4]), rows(16, LOW), rows(64, LOW))
    )
    assert final is not None
    assert final.scores["avg_at_4"][0] == pytest.approx(sigmoid(65536, *LOW))


def test_replicates_have_the_spread_of_drawing_the_validation_problems_anew() -> None:
    problems = 100
    draw = np.random.default_rng(0)
    cells = [rows(n, LOW, draw=draw, validation_problems=problems) for n in (4, 16)]
    final = observed_scores(analysed(*cells, replicates=2000))
    assert final is not None
    for index, cell in enumerate(cells):
        scores = cell["eval_right"].iloc[-1] / 4
        replicates = final.scores["avg_at_4"][index, 1:]
        assert replicates.shape == (2000,)
        assert replicates.mean() == pytest.approx(scores.mean(), abs=0.005)
        assert replicates.std() == pytest.approx(scores.std() / np.sqrt(problems), rel=0.1)


def test_replicates_of_two_seeds_have_the_spread_of_their_mean() -> None:
    other = (0.3, 0.54, 4000.0, 1.5)
    final = observed_scores(analysed(rows(4, LOW), rows(4, other, seed=1), rows(16, LOW), replicates=2000))
    assert final is not None
    pair = [sigmoid(65536, *LOW), sigmoid(65536, *other)]
    assert final.scores["avg_at_4"][0, 1:].std() == pytest.approx(np.std(pair, ddof=1) / np.sqrt(2), rel=0.1)
    assert final.scores["avg_at_4"][1, 1:].std() < 1e-12


def test_a_lone_evaluation_of_several_seeds_still_holds_the_luck_of_its_answers() -> None:
    draw = np.random.default_rng(1)
    cells = [
        rows(4, LOW, draw=draw),
        rows(4, LOW, seed=1, draw=draw, marks=MARKS[:4]),
        rows(16, LOW, draw=draw),
        rows(64, LOW, draw=draw),
    ]
    final = observed_scores(analysed(*cells, replicates=2000))
    assert final is not None
    expected = (cells[0]["eval_right"].iloc[-1] / 4).std() / np.sqrt(100)
    assert final.scores["avg_at_4"][0, 1:].std() == pytest.approx(expected, rel=0.1)


def test_all_metrics_are_drawn_with_the_same_problems() -> None:
    draw = np.random.default_rng(2)
    cells = []
    for n in (4, 16):
        cell = rows(n, LOW, draw=draw)
        cell["eval_right"] = [
            (right > 2).astype(np.int32) * 4 for right in cell["eval_right"]
        ]  # all or nothing
        for metric in ("avg_at_4", "best_at_4", "worst_at_4"):
            cell[metric] = [right.mean() / 4 for right in cell["eval_right"]]
        cells.append(cell)
    final = observed_scores(analysed(*cells, replicates=50))
    assert final is not None
    assert list(final.scores) == ["avg_at_4", "best_at_4", "worst_at_4"]
    assert final.scores["avg_at_4"].std() > 0
    for metric in ("best_at_4", "worst_at_4"):
        assert final.scores[metric] == pytest.approx(final.scores["avg_at_4"])


def test_fitted_scores_are_those_of_the_curves() -> None:
    final = fitted_scores(analysed(rows(4, LOW), rows(16, HIGH)))
    assert final is not None
    expected = [[sigmoid(65536, *LOW)], [sigmoid(65536, *HIGH)]]
    assert final.scores["avg_at_4"] == pytest.approx(np.array(expected), abs=1e-4)


def test_the_sensitivity_is_the_range_over_n_and_over_problems_per_batch_in_points() -> None:
    shapes = {(16, 4): 0.5, (16, 16): 0.6, (32, 4): 0.52, (32, 16): 0.58}
    table = sensitivity_table(
        analysed(*(rows(n, (0.3, top, 4000.0, 1.5), bp) for (bp, n), top in shapes.items()))
    ).set_index("quantity")
    reached = sigmoid(65536, 0.0, 1.0, 4000.0, 1.5)  # share of its gain that each curve has made
    assert table["points"]["within_n"] == pytest.approx(100 * (0.10 + 0.06) / 2 * reached, abs=0.02)
    assert table["points"]["within_problems"] == pytest.approx(100 * 0.02 * reached, abs=0.02)
    assert table["points"]["best_n"] == pytest.approx(100 * (0.60 - 0.52) * reached, abs=0.02)
    assert table[["low", "high", "noise", "noise_high"]].isna().all(axis=None)


def test_equal_allocations_are_no_more_sensitive_than_noise() -> None:
    draw = np.random.default_rng(3)
    cells = [rows(n, LOW, bp, draw=draw) for bp in (16, 32) for n in (4, 16, 64)]
    table = sensitivity_table(analysed(*cells, replicates=200))
    assert (table["points"] < table["noise_high"]).all()
    assert (table["noise"] > 0).all()
    assert (table["low"] <= table["high"]).all()


def test_the_best_n_is_told_for_each_metric() -> None:
    low, high = rows(4, LOW), rows(16, HIGH)
    low["best_at_4"], high["best_at_4"] = 0.9, 0.8
    table = best_n_table(analysed(low, high)).set_index("metric")
    assert table["best_n"].to_dict() == {"avg_at_4": 16, "best_at_4": 4}


def test_one_allocation_leaves_nothing_to_compare() -> None:
    alone = analysed(rows(4, LOW), replicates=10)
    assert observed_scores(alone) is None
    assert fitted_scores(alone) is None
    assert sensitivity_table(alone).empty
    assert best_n_table(alone).empty

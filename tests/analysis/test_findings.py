"""From tables to everything that a report says."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.findings import Analysis, analyse, finite_or_none, short_count
from analysis.fitting.observations import Allocation
from analysis.options import FitOptions
from analysis.tables import GridTables
from grids.errors import UserError
from tests.analysis.conftest import Sigmoid, cell_rows, sigmoid, tables_of

FAST: Sigmoid = (0.3, 0.6, 2000.0, 1.0)
HIGH: Sigmoid = (0.3, 0.7, 5000.0, 1.0)
"""Crosses FAST at C = 7000."""
BASE = {"avg_at_4": 0.3}
NO_INTERVALS = FitOptions(replicates=0)


def two_cells() -> GridTables:
    return tables_of(cell_rows(4, FAST), cell_rows(16, HIGH), base=BASE)


def noisy(seeds: int = 2, n: tuple[int, ...] = (4, 16)) -> GridTables:
    draw = np.random.default_rng(0)
    shapes = {4: FAST, 16: HIGH}
    cells = [cell_rows(k, shapes[k], seed=seed, draw=draw) for k in n for seed in range(seeds)]
    right = draw.binomial(4, 0.3, 100)
    return tables_of(*cells, base={"avg_at_4": right.mean() / 4, "eval_right": right.tolist()})


def test_the_crossing_of_two_known_curves_is_found() -> None:
    found = analyse(two_cells(), NO_INTERVALS)
    assert (found.metric, found.base_reward) == ("avg_at_4", 0.3)
    assert [curve.allocation for curve in found.curves] == [Allocation(4, 16), Allocation(16, 16)]
    (change,) = found.frontier.changes
    assert (change.before, change.after, change.kind) == (4, 16, "crossing")
    assert change.compute == pytest.approx(7000, rel=0.01)
    for point in found.budgets:
        assert point.rollouts_per_problem == (4 if point.compute < 7000 else 16)
        best = max(float(sigmoid(point.compute, *FAST)), float(sigmoid(point.compute, *HIGH)))
        assert point.reward == pytest.approx(best, abs=1e-3)
    assert found.missing == []
    assert not found.frontier.law.identified


@pytest.mark.parametrize(("unit", "size"), [("tokens", 1000.0), ("accelerator_seconds", 0.5)])
def test_compute_in_another_unit_moves_the_frontier_to_that_unit(unit: str, size: float) -> None:
    options = replace(NO_INTERVALS, compute=unit)  # type: ignore[arg-type]
    found = analyse(two_cells(), options)
    (change,) = found.frontier.changes
    assert change.compute == pytest.approx(7000 * size, rel=0.01)
    assert len(found.frontiers) == 1


def test_a_unit_that_the_table_lacks_leaves_every_cell_unfitted_with_the_reason() -> None:
    tables = two_cells()
    holed = replace(tables, history=tables.history.drop(columns="compute_tokens"))
    found = analyse(holed, replace(NO_INTERVALS, compute="tokens"))
    assert found.curves == ()
    assert found.missing == [
        "bp16-n16-s0: not fitted: column compute_tokens is absent",
        "bp16-n4-s0: not fitted: column compute_tokens is absent",
    ]


def test_another_metric_is_taken_on_request_and_the_headline_otherwise() -> None:
    tables = noisy(seeds=1)
    assert analyse(tables, NO_INTERVALS).metric == "avg_at_4"
    best = analyse(tables, replace(NO_INTERVALS, metric="best_at_4"))
    assert best.metric == "best_at_4"
    assert best.base_reward is None
    rewards = tables.history.set_index("cell")["best_at_4"].loc["bp16-n4-s0"].to_numpy()
    assert best.groups[0].reward == pytest.approx(rewards)


def test_any_column_of_shares_can_be_the_metric() -> None:
    tables = two_cells()
    tables = replace(tables, history=tables.history.assign(aime=tables.history["avg_at_4"] / 2))
    found = analyse(tables, replace(NO_INTERVALS, metric="aime"))
    assert found.budgets[-1].reward == pytest.approx(
        float(sigmoid(found.budgets[-1].compute, *HIGH)) / 2, abs=1e-3
    )


@pytest.mark.parametrize(
    ("metric", "words"),
    [("reward", "'reward' is not in the table; choose one of avg_at_4"), ("percent", "outside 0 to 1")],
)
def test_a_metric_that_is_absent_or_no_share_is_refused(metric: str, words: str) -> None:
    tables = two_cells()
    tables = replace(tables, history=tables.history.assign(percent=100 * tables.history["avg_at_4"]))
    with pytest.raises(UserError, match=words) as refused:
        analyse(tables, replace(NO_INTERVALS, metric=metric))
    assert "\n" not in str(refused.value)


def test_seeds_share_a_curve_and_each_cell_has_its_own_too() -> None:
    found = analyse(noisy(seeds=3), FitOptions(replicates=20))
    assert [len(curve.cells) for curve in found.curves] == [3, 3]
    assert len(found.cell_fits) == 6
    assert found.resampling.over == ("seeds", "problems")
    alone = found.cell_fits["bp16-n16-s1"]
    assert alone.points == found.curves[1].fit.points // 3


def test_intervals_hold_the_curve_in_an_ordinary_grid() -> None:
    found = analyse(noisy(), FitOptions(replicates=200))
    for point in found.frontier.points:
        assert point.reward_interval is not None and point.rollouts_per_problem_interval is not None
        low, high = point.reward_interval
        assert low < point.reward < high
        assert high - low < 0.2
        few, many = point.rollouts_per_problem_interval
        assert few <= point.rollouts_per_problem <= many
        assert point.not_worse_n is not None and point.rollouts_per_problem in point.not_worse_n


def numbers(found: Analysis) -> list[object]:
    return [found.frontier.points, found.frontier.changes, found.budgets]


def test_the_same_table_and_seed_give_the_same_numbers() -> None:
    options = FitOptions(replicates=50)
    found = analyse(noisy(), options)
    assert numbers(found) == numbers(analyse(noisy(), options))
    other = analyse(noisy(), replace(options, seed=1))
    assert other.frontier.points != found.frontier.points
    assert [p.reward for p in other.frontier.points] == [p.reward for p in found.frontier.points]


def test_more_confidence_gives_wider_intervals() -> None:
    def width(confidence: float) -> float:
        found = analyse(noisy(), FitOptions(replicates=100, confidence=confidence)).budgets[0].reward_interval
        assert found is not None
        return found[1] - found[0]

    assert width(0.5) < width(0.9) < width(0.99)


def test_without_a_base_model_curves_rest_on_the_evaluations_alone() -> None:
    found = analyse(tables_of(cell_rows(4, FAST), cell_rows(16, HIGH)), NO_INTERVALS)
    assert found.base_reward is None
    assert found.frontier.changes[0].compute == pytest.approx(7000, rel=0.02)


def test_a_half_finished_grid_names_its_holes_and_fits_the_rest() -> None:
    tables = tables_of(
        cell_rows(4, FAST),
        cell_rows(16, HIGH),
        cell_rows(64, HIGH, marks=[2e3, 4e3]),
        base=BASE,
        bp16_n16_s0="failed",
        bp16_n128_s0="pending",
    )
    tables = replace(
        tables,
        reasons={"bp16-n16-s0": "out of memory"},
        complaints={
            "bp16-n4-s0": ["two rows of step 16: the last is kept"],
            "bp16-n8-s0": ["expected, but absent"],
        },
    )
    found = analyse(tables, NO_INTERVALS)
    assert len(found.curves) == 2
    assert found.missing == [
        "bp16-n128-s0: pending; not fitted: no evaluation yet",
        "bp16-n16-s0: failed (out of memory)",
        "bp16-n4-s0: two rows of step 16: the last is kept",
        "bp16-n64-s0: not fitted: 2 usable points of avg_at_4; a curve needs at least 4",
        "bp16-n8-s0: expected, but absent; not fitted: no usable row",
    ]


def test_one_cell_alone_is_a_frontier_of_itself() -> None:
    found = analyse(tables_of(cell_rows(16, HIGH), base=BASE), NO_INTERVALS)
    assert {point.rollouts_per_problem for point in found.frontier.points} == {16}
    assert found.frontier.changes == []
    assert found.held_out is None
    assert "1 value of n (16)" in found.frontier.law.text


@pytest.mark.parametrize("replicates", [0, 20])
def test_an_empty_history_is_analysed_as_nothing(replicates: int) -> None:
    tables = replace(tables_of(base=BASE), states={"bp16-n4-s0": "pending"})
    found = analyse(tables, FitOptions(replicates=replicates))
    assert (found.curves, found.frontier.points, found.budgets, found.held_out) == ((), [], [], None)
    assert found.views.table.empty
    assert found.missing == ["bp16-n4-s0: pending; not fitted: no evaluation yet"]
    assert found.frontier.law.text == "The law is not identified: no allocation could be fitted."


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_metric_that_never_changes_gives_level_curves(share: float) -> None:
    tables = two_cells()
    found = analyse(replace(tables, history=tables.history.assign(avg_at_4=share), base=None), NO_INTERVALS)
    assert all(point.reward == pytest.approx(share, abs=1e-6) for point in found.frontier.points)
    assert found.frontier.changes == []
    assert {point.rollouts_per_problem for point in found.frontier.points} == {4}


@pytest.mark.parametrize("lost", [0, 2, 4])  # the smallest n, the largest, and one between of the other B_p
def test_losing_a_cell_still_gives_an_analysis(lost: int) -> None:
    shapes = [(4, FAST), (16, HIGH), (64, (0.3, 0.75, 2e4, 1.0))]
    draw = np.random.default_rng(1)
    cells = [
        cell_rows(n, shape, problems=p, draw=draw, validation_problems=30)
        for p in (8, 16)
        for n, shape in shapes
    ]
    kept = [cell for index, cell in enumerate(cells) if index != lost]
    found = analyse(tables_of(*kept, cells[lost].iloc[:2]), FitOptions(replicates=20))
    assert len(found.curves) == 5
    (hole,) = found.missing
    assert hole.startswith(str(cells[lost]["cell"].iloc[0]))


def test_an_evaluation_without_per_problem_scores_is_named_and_the_rest_has_intervals() -> None:
    tables = noisy(seeds=1)
    history = tables.history.copy()
    first = history.index[history["cell"] == "bp16-n4-s0"][0]
    history["eval_right"] = [
        None if index == first else right for index, right in history["eval_right"].items()
    ]
    found = analyse(replace(tables, history=history), FitOptions(replicates=50))
    assert any("bp16-n4" in words and "eval_right" in words for words in found.resampling.missing)
    assert found.budgets[-1].reward_interval is not None
    low, high = found.budgets[-1].reward_interval
    assert found.budgets[-1].rollouts_per_problem == 16 and high - low > 0.005


@pytest.mark.parametrize(
    ("value", "text"),
    [(950, "950"), (1500, "1.5k"), (999.6, "1k"), (32_000, "32k"), (2.4e6, "2.4M"), (1.23e9, "1.23G")],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert short_count(value) == text


def test_numbers_that_json_has_not_become_none() -> None:
    assert [finite_or_none(value) for value in (1.5, float("nan"), float("inf"))] == [1.5, None, None]


def test_states_of_a_table_without_rows_of_the_metric_are_kept_apart() -> None:
    tables = two_cells()
    holed = tables.history.copy()
    holed.loc[holed["cell"] == "bp16-n4-s0", "avg_at_4"] = np.nan
    found = analyse(replace(tables, history=pd.DataFrame(holed)), NO_INTERVALS)
    assert found.unfitted == {"bp16-n4-s0": "0 usable points of avg_at_4; a curve needs at least 4"}
    assert [curve.allocation.rollouts_per_problem for curve in found.curves] == [16]


def test_a_column_of_lists_is_no_metric() -> None:
    rows = cell_rows(4, FAST)
    tables = tables_of(rows.assign(eval_right=[[1, 0]] * len(rows)))
    with pytest.raises(UserError, match=r"'eval_right' holds no single number a row; choose one of avg_at_4"):
        analyse(tables, replace(NO_INTERVALS, metric="eval_right"))


def test_in_tokens_the_end_does_not_fall_to_the_cell_with_the_longest_answers() -> None:
    # n = 16 is worse throughout, and costs 5 % more tokens for each rollout.
    best, worse = cell_rows(4, HIGH), cell_rows(16, FAST)
    tables = tables_of(
        best.assign(compute_tokens=best["compute_rollouts"] * 10.0),
        worse.assign(compute_tokens=worse["compute_rollouts"] * 10.5),
        base=BASE,
    )
    last = analyse(tables, replace(NO_INTERVALS, compute="tokens")).budgets[-1]
    assert last.compared_n == (4, 16)
    assert last.rollouts_per_problem == 4
    assert last.compute == best["compute_rollouts"].max() * 10.0

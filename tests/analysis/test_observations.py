"""What of a history is fitted."""

import numpy as np
import pandas as pd
import pytest

from analysis.fitting.observations import Allocation, base_point, observe
from tests.analysis.conftest import cell_rows

SHAPE = (0.3, 0.7, 8e3, 1.0)


def history(*cells: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(cells, ignore_index=True)


def test_cells_that_differ_in_the_seed_are_one_allocation() -> None:
    table = history(
        cell_rows(16, SHAPE, seed=1),
        cell_rows(4, SHAPE),
        cell_rows(16, SHAPE, seed=0),
        cell_rows(4, SHAPE, problems=8),
    )
    groups, unfitted = observe(table, "avg_at_4", "compute_rollouts", with_scores=True)
    assert unfitted == {}
    assert [group.allocation for group in groups] == [Allocation(4, 8), Allocation(4, 16), Allocation(16, 16)]
    last = groups[-1]
    assert (last.cells, last.seeds) == (("bp16-n16-s0", "bp16-n16-s1"), (0, 1))
    assert last.allocation.batch_rollouts == 256
    own = last.of_cell(1)
    assert own.cells == ("bp16-n16-s1",)
    assert own.reward.tolist() == table["avg_at_4"][table["cell"] == "bp16-n16-s1"].tolist()


def test_compute_is_taken_in_the_unit_that_is_asked_for() -> None:
    (tokens,), _ = observe(cell_rows(4, SHAPE), "avg_at_4", "compute_tokens", with_scores=False)
    assert tokens.compute.tolist() == (1000 * tokens.rollouts).tolist()


def test_cells_with_fewer_than_four_usable_computes_are_named_and_left_out() -> None:
    holed = cell_rows(64, SHAPE)
    holed.loc[3:, "avg_at_4"] = np.nan
    repeated = cell_rows(32, SHAPE, marks=[1e4, 2e4, 4e4])
    repeated = history(repeated, repeated)
    groups, unfitted = observe(
        history(holed, cell_rows(4, SHAPE), repeated), "avg_at_4", "compute_rollouts", with_scores=True
    )
    assert [group.allocation for group in groups] == [Allocation(4, 16)]
    assert unfitted == {
        "bp16-n64-s0": "3 usable points of avg_at_4; a curve needs at least 4",
        "bp16-n32-s0": "3 usable points of avg_at_4; a curve needs at least 4",
    }


def test_a_missing_compute_column_is_the_reason_for_every_cell() -> None:
    table = cell_rows(4, SHAPE).drop(columns="accelerator_seconds")
    groups, unfitted = observe(table, "avg_at_4", "accelerator_seconds", with_scores=True)
    assert groups == []
    assert unfitted == {"bp16-n4-s0": "column accelerator_seconds is absent"}


@pytest.mark.parametrize("metric", ["avg_at_4", "best_at_4", "worst_at_4"])
def test_scores_of_problems_have_the_metric_as_their_mean(metric: str) -> None:
    table = cell_rows(4, SHAPE, draw=np.random.default_rng(0), validation_problems=50)
    (group,), _ = observe(table, metric, "compute_rollouts", with_scores=True)
    assert group.scores is not None
    assert group.scores.shape == (len(table), 50)
    assert group.scores.mean(axis=1) == pytest.approx(table[metric].to_numpy())


def test_counts_of_right_answers_become_each_metrics_scores() -> None:
    table = cell_rows(4, SHAPE, marks=[1e3, 2e3, 4e3, 8e3]).assign(avg_at_4=5 / 12, best_at_4=2 / 3)
    table["eval_right"] = [np.array([0, 1, 4])] * 4
    for metric, scores in (("avg_at_4", [0, 0.25, 1]), ("best_at_4", [0, 1, 1])):
        (group,), _ = observe(table, metric, "compute_rollouts", with_scores=True)
        assert group.scores is not None
        assert group.scores[0].tolist() == scores


def test_no_scores_where_a_count_is_missing_or_of_another_set_or_not_asked_for() -> None:
    whole = cell_rows(4, SHAPE, draw=np.random.default_rng(0))
    missing = whole.assign(eval_right=[None, *whole["eval_right"][1:]])
    shorter = whole.assign(eval_right=[whole["eval_right"][0][:-1], *whole["eval_right"][1:]])
    for table, asked in ((missing, True), (shorter, True), (whole, False)):
        (group,), _ = observe(table, "avg_at_4", "compute_rollouts", with_scores=asked)
        assert group.scores is None


def test_counts_of_fewer_answers_are_no_scores_of_a_metric() -> None:
    # avg@8 comes from other answers than the four that were counted.
    table = cell_rows(4, SHAPE, draw=np.random.default_rng(0))
    (group,), _ = observe(
        table.assign(avg_at_8=table["avg_at_4"]), "avg_at_8", "compute_rollouts", with_scores=True
    )
    assert group.scores is None


def test_observations_up_to_a_compute_include_it() -> None:
    (group,), _ = observe(cell_rows(4, SHAPE), "avg_at_4", "compute_rollouts", with_scores=False)
    limit = float(group.compute[5])
    assert group.up_to(limit).compute.tolist() == group.compute[:6].tolist()


def test_the_base_model_is_a_point_where_its_score_is_known() -> None:
    known = base_point({"avg_at_4": 0.25, "eval_right": [0, 2]}, "avg_at_4")
    assert known is not None
    assert known.reward == 0.25
    assert known.scores is not None
    assert known.scores.tolist() == [0, 0.5]
    assert base_point({"avg_at_4": 0.25}, "best_at_4") is None
    assert base_point({"avg_at_4": float("nan")}, "avg_at_4") is None
    assert base_point(None, "avg_at_4") is None


def test_an_empty_history_has_no_observations() -> None:
    assert observe(cell_rows(4, SHAPE).iloc[:0], "avg_at_4", "compute_rollouts", with_scores=True) == ([], {})

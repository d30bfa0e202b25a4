"""What is left out of faulty rows, and what is said about it."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.reading.sources import build_tables
from analysis.tables import GridTables

CELL = "bp4-n2-s0"


def row(step: int, /, **changed: Any) -> dict[str, Any]:
    """A sound row of a cell with B_p = 4 and n = 2, so that C = 8 * step."""
    sound = {
        "problems_per_batch": 4,
        "rollouts_per_problem": 2,
        "seed": 0,
        "step": step,
        "compute_rollouts": 8 * step,
        "compute_tokens": 100 * step,
        "avg_at_4": 0.25,
    }
    return {name: value for name, value in (sound | changed).items() if value is not None}


def tables(*rows: dict[str, Any], base: dict[str, Any] | None = None, **others: Any) -> GridTables:
    return build_tables("grid", {CELL: list(rows), **others}, base, {}, {}, None)


def said(result: GridTables, cell: str = CELL) -> str:
    (sentence,) = result.complaints[cell]
    return sentence


def test_sound_rows_are_sorted_by_step_and_nothing_is_said():
    result = tables(row(3), row(1), row(2))
    assert result.history["step"].tolist() == [1, 2, 3]
    assert result.history["compute_rollouts"].dtype == np.int64
    assert result.complaints == {}


@pytest.mark.parametrize("name", ["problems_per_batch", "rollouts_per_problem", "seed"])
def test_a_row_without_allocation_or_seed_is_left_out(name):
    result = tables(row(1), row(2, **{name: None}), row(3))
    assert result.history["step"].tolist() == [1, 3]
    assert said(result) == f"1 row without a usable {name}; left out"


def test_a_row_with_neither_step_nor_compute_is_left_out_but_one_of_them_is_enough():
    result = tables(
        row(1, step=None), row(2, compute_rollouts=None), row(3, step=None, compute_rollouts=None)
    )
    assert result.history[["step", "compute_rollouts"]].to_numpy().tolist() == [[1, 8], [2, 16]]
    assert said(result) == "1 row without a usable step, compute_rollouts; left out"


@pytest.mark.parametrize("name", ["problems_per_batch", "rollouts_per_problem", "seed"])
def test_a_cell_whose_identity_changes_is_left_out_whole_and_others_stay(name):
    other = [row(1, seed=1), row(2, seed=1)]
    result = tables(row(1), row(2, **{name: 8, "compute_rollouts": None}), other=other)
    assert result.history["cell"].tolist() == ["other", "other"]
    assert said(result).startswith(f"{name} changes between its rows (")
    assert said(result).endswith("8); the cell is left out")


def test_compute_in_other_units_is_named_with_an_example():
    result = tables(row(1), row(2, compute_rollouts=16_000), row(3))
    assert result.history["step"].tolist() == [1, 3]
    assert "(step 2: 16000 in place of 16; compute goes backwards)" in said(result)
    result = tables(row(1, compute_rollouts=1), row(2, compute_rollouts=2))
    assert result.history.empty
    assert "2 rows" in said(result) and "(step 1: 1 in place of 8; mixed units?)" in said(result)


def test_compute_that_is_no_whole_number_of_steps_is_left_out():
    result = tables(row(1), row(2, step=None, compute_rollouts=20))
    assert result.history["step"].tolist() == [1]
    assert "(20 is 2.5 steps; mixed units?)" in said(result)


def test_equal_rows_of_one_step_are_kept_once_whatever_was_measured():
    result = tables(row(1, logged_at_ms=1, eval_right=[1]), row(2), row(1, logged_at_ms=2, eval_right=[1]))
    assert result.history["step"].tolist() == [1, 2]
    assert said(result) == "1 row too many, equal to another; left out"


@pytest.mark.parametrize("changed", [{"avg_at_4": 0.5}, {"avg_at_4": None}, {"eval_right": [1, 1]}])
def test_rows_of_one_step_that_differ_are_left_out_and_the_others_stay(changed):
    doubtful = [row(2, eval_right=[2, 0]), row(2, **{"eval_right": [2, 0], **changed})]
    result = tables(row(1), *doubtful, row(3), other=[row(2, seed=1)])
    assert result.history[["cell", "step"]].to_numpy().tolist() == [[CELL, 1], [CELL, 3], ["other", 2]]
    assert said(result) == (
        "2 rows that differ from another of the same step (step 2); left out, keep the right one of each step"
    )


def test_of_many_doubtful_steps_the_first_three_are_named():
    doubtful = [row(step, avg_at_4=score) for step in (9, 2, 4, 3) for score in (0.25, 0.5)]
    result = tables(row(1), *doubtful, row(10))
    assert result.history["step"].tolist() == [1, 10]
    assert said(result).startswith(
        "8 rows that differ from another of the same step (step 2, 3, 4 and more); left out"
    )


PERCENT = [row(1, avg_at_4=25.0), row(2, avg_at_4=50.0)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (PERCENT, "avg_at_4 is above 1 in 2 rows (percent? divide by 100); not used"),
        (
            [row(1, compute_rollouts=-8), row(2)],
            "1 row without a usable compute_rollouts; left out",
        ),
        ([row(1, rollouts_per_problem=2.5)], "1 row without a usable rollouts_per_problem; left out"),
    ],
)
def test_what_is_wrong_with_every_cell_is_said_once_however_many_rows_it_concerns(
    rows: list[dict[str, Any]], words: str
) -> None:
    others: dict[str, Any] = {
        f"o{seed}": [r | {"seed": seed} for r in [*rows, rows[0] | {"kl": 1.0}]] for seed in (1, 2)
    }
    result = tables(*rows, base=None, **others)
    assert result.complaints["grid"][0] == f"every cell of grid, such as {CELL}: {words}"
    assert not any(
        words[2:] in sentence for cell in ("o1", "o2") for sentence in result.complaints.get(cell, [])
    )


def test_what_is_wrong_with_some_cells_or_another_score_stays_with_its_cell():
    result = tables(*PERCENT, sound=[row(1, seed=1)], other=[r | {"seed": 2} for r in PERCENT])
    assert set(result.complaints) == {CELL, "other"}
    best = [row(1, seed=1, best_at_4=25.0)]
    result = tables(row(1, best_at_16=25.0), other=best)
    assert result.complaints["other"][-1].startswith("best_at_4 is above 1")
    assert not any("above 1" in sentence for sentence in result.complaints.get("grid", []))


def test_a_cell_with_nothing_but_the_base_models_row_does_not_keep_a_complaint_from_being_common():
    result = tables(*PERCENT, other=[r | {"seed": 1} for r in PERCENT], start=[row(0)])
    assert result.complaints["start"] == ["no evaluated step yet"]
    assert set(result.complaints) == {"grid", "start"}


def test_a_missing_score_keeps_its_row_and_is_named_once_for_a_metric():
    result = tables(
        row(1, best_at_4=0.5),
        row(2, avg_at_4=float("nan"), best_at_4=0.5),
        row(3, avg_at_4=None, best_at_4=0.5),
    )
    assert result.history["avg_at_4"].isna().tolist() == [False, True, True]
    assert said(result) == "2 rows without avg_at_4; not used for its curve"


def test_percentages_are_not_taken_for_shares_even_where_they_are_below_one():
    result = tables(row(1, avg_at_4=0.9, best_at_4=0.5), row(2, avg_at_4=43.0, best_at_4=0.6))
    assert "avg_at_4" not in result.history
    assert result.history["best_at_4"].tolist() == [0.5, 0.6]
    assert said(result) == "avg_at_4 is above 1 in 1 row (percent? divide by 100); not used"


def test_a_score_below_zero_is_not_used_and_other_cells_keep_theirs():
    result = tables(row(1, avg_at_4=-0.1), other=[row(1, seed=1)])
    assert result.history.set_index("cell")["avg_at_4"].dropna().to_dict() == {"other": 0.25}
    assert said(result) == "avg_at_4 is below 0 in 1 row; not used"


def test_cumulative_tokens_that_fall_are_not_used_in_that_cell():
    result = tables(row(1), row(2), row(3, compute_tokens=150), other=[row(1, seed=1)])
    assert result.history.set_index("cell")["compute_tokens"].dropna().to_dict() == {"other": 100}
    assert said(result) == "compute_tokens goes backwards at step 3; not used"


def test_per_problem_counts_must_be_one_a_problem_and_agree_with_the_score():
    result = tables(
        row(1, eval_right=[2, 0]),
        row(2, eval_right=[1, 1]),
        row(3, eval_right=[2, 0, 1]),
        row(4, eval_right=[4, 4]),
        row(5, eval_right=[0.5, 1]),
        row(6),
    )
    counts = [None if value is None else value.tolist() for value in result.history["eval_right"]]
    assert counts == [[2, 0], [1, 1], None, None, None, None]
    assert result.complaints[CELL] == [
        "eval_right is no list of counts in 1 row; taken as missing",
        "eval_right holds another number of problems than the usual 2 in 1 row; not used there",
        "eval_right does not agree with avg_at_4 in 1 row; not used there",
    ]


def test_a_count_above_the_answers_of_a_problem_is_not_used():
    result = tables(row(1, avg_at_4=0.75, eval_right=[6, 0]), row(2, eval_right=[1, 1]))
    assert result.history["eval_right"].iloc[0] is None
    assert said(result) == "eval_right does not agree with avg_at_4 in 1 row; not used there"


def test_words_in_place_of_numbers_are_missing_numbers():
    result = tables(row(1), row(2, avg_at_4="high"), row(3, avg_at_4="0.5"))
    assert result.history["avg_at_4"].dropna().tolist() == [0.25, 0.5]
    assert result.complaints[CELL] == [
        "avg_at_4 is no number in 1 row; taken as missing",
        "1 row without avg_at_4; not used for its curve",
    ]


def test_rows_at_no_compute_are_the_base_models():
    at_zero = row(0, avg_at_4=0.125, eval_right=[1, 0])
    result = tables(at_zero, row(1, eval_right=[1, 1]), other=[at_zero | {"seed": 1}])
    assert result.base == {
        "compute_rollouts": 0,
        "compute_tokens": 0.0,
        "avg_at_4": 0.125,
        "eval_right": [1, 0],
    }
    assert result.history["step"].tolist() == [1]
    assert result.complaints == {"other": ["no evaluated step yet"]}


def test_differing_base_rows_are_averaged_and_named():
    other = [row(0, seed=1, avg_at_4=0.5, eval_right=[2, 2]), row(1, seed=1)]
    result = tables(row(0, avg_at_4=0.25, eval_right=[1, 1]), row(1), other=other)
    assert result.base is not None
    assert result.base["avg_at_4"] == 0.375 and "eval_right" not in result.base
    assert "differ in avg_at_4, eval_right" in said(result, "base")


def test_the_base_models_own_row_is_preferred_and_checked_like_others():
    base = {
        "compute_rollouts": 0,
        "avg_at_4": 0.5,
        "best_at_4": 70.0,
        "eval_right": [2, 2],
        "samples": [{"a": 1}],
    }
    result = tables(row(0, avg_at_4=0.1), row(1), base=base)
    assert result.base == {"compute_rollouts": 0, "avg_at_4": 0.5, "eval_right": [2, 2]}
    assert said(result, "base") == "best_at_4 is above 1 in 1 row (percent? divide by 100); not used"


def test_no_rows_at_all_give_an_empty_table_with_the_required_columns():
    result = build_tables("grid", {}, None, {"a": "failed"}, {"a": "no memory"}, None)
    assert isinstance(result.history, pd.DataFrame) and result.history.empty
    assert {"cell", "problems_per_batch", "compute_rollouts"} <= set(result.history.columns)
    assert result.states == {"a": "failed"} and result.reasons == {"a": "no memory"}
    assert result.complaints == {"a": ["no evaluated step yet"]}


def test_rows_without_any_metric_are_named():
    result = tables(row(1, avg_at_4=None))
    assert said(result) == "no validation score (avg_at_K) in any row"


def test_columns_that_nobody_knows_are_kept_where_they_are_numbers():
    result = tables(row(1, aime_avg=0.2, note="x"))
    assert result.history["aime_avg"].tolist() == [0.2]
    assert "note" not in result.history

"""From a grid to its cells: order, bounds, rounding, learning rates, marks."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from grids.errors import UserError
from grids.expansion import (
    Cell,
    canary_of,
    compute_marks,
    evaluated_steps,
    expand,
    scaled_learning_rate,
    warmed_up_learning_rate,
)
from grids.loading import load_grid, parse_grid
from grids.spec import EvaluationSpec, GridSpec, OptimiserSpec
from tests.grids.test_spec import GRID, PATH

GRIDS = Path(__file__).parents[2] / "grids"


def grid(axes: str) -> GridSpec:
    old = "problems_per_batch: [16], rollouts_per_problem: [4, 16], compute_rollouts: 4096"
    assert old in GRID
    return parse_grid(GRID.replace(old, axes), PATH)


def test_cells_are_ordered_by_problems_then_rollouts_then_seed() -> None:
    cells = expand(
        grid(
            "problems_per_batch: [32, 16], rollouts_per_problem: [8, 4], seeds: [1, 0], compute_rollouts: 1024"
        )
    )
    assert [cell.id for cell in cells] == [
        "bp16-n4-s0",
        "bp16-n4-s1",
        "bp16-n8-s0",
        "bp16-n8-s1",
        "bp32-n4-s0",
        "bp32-n4-s1",
        "bp32-n8-s0",
        "bp32-n8-s1",
    ]


def test_batches_above_b_max_are_left_out() -> None:
    cells = expand(
        grid(
            "problems_per_batch: [16, 32], rollouts_per_problem: {from: 2, to: 8}, max_batch_rollouts: 128, compute_rollouts: 1024"
        )
    )
    assert [(c.problems_per_batch, c.rollouts_per_problem) for c in cells] == [
        (16, 2),
        (16, 4),
        (16, 8),
        (32, 2),
        (32, 4),
    ]


def test_a_budget_that_is_no_multiple_of_the_batch_is_rounded_down() -> None:
    (cell,) = expand(grid("problems_per_batch: [16], rollouts_per_problem: [4], compute_rollouts: 1000"))
    assert (cell.update_steps, cell.compute_rollouts) == (15, 960)


def test_an_empty_grid_is_refused_with_the_smallest_batch() -> None:
    with pytest.raises(UserError, match=r"grid\.max_batch_rollouts: 32 is below the smallest batch 64"):
        expand(
            grid(
                "problems_per_batch: [16], rollouts_per_problem: [4], max_batch_rollouts: 32, compute_rollouts: 1000"
            )
        )


def test_a_budget_below_one_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"grid\.compute_rollouts: 100 is less than one batch of 256"):
        expand(grid("problems_per_batch: [16], rollouts_per_problem: [4, 16], compute_rollouts: 100"))


@pytest.mark.parametrize(("name", "cells", "b_max"), [("easy", 39, 65_536), ("hard", 27, 16_384)])
def test_the_papers_grids_have_the_published_number_of_cells(name: str, cells: int, b_max: int) -> None:
    spec = load_grid(GRIDS / f"paper_{name}_qwen2.5_7b.yaml")
    found = expand(spec)
    assert len(found) == cells
    assert max(cell.batch_rollouts for cell in found) == b_max
    by_batch = {cell.batch_rollouts: cell.learning_rate for cell in found}
    # Square-root scaling of 1e-6 anchored at B = 1024: four times the batch, twice the rate.
    assert by_batch[1024] == pytest.approx(1e-6)
    assert by_batch[4096] == pytest.approx(2e-6)
    assert by_batch[256] == pytest.approx(5e-7)


@pytest.mark.parametrize(("scaling", "expected"), [("sqrt", 6e-4), ("linear", 12e-4), ("constant", 3e-4)])
def test_the_learning_rate_scales_with_the_batch(scaling: str, expected: float) -> None:
    optimiser = OptimiserSpec(learning_rate=3e-4, anchor_batch_rollouts=100, scaling=scaling)  # type: ignore[arg-type]
    assert scaled_learning_rate(optimiser, 400) == pytest.approx(expected)


def test_warm_up_is_linear_and_then_constant() -> None:
    assert [warmed_up_learning_rate(1.0, 4, step) for step in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert warmed_up_learning_rate(1.0, 0, 1) == 1.0


def test_marks_double_exactly_and_do_not_depend_on_a_budget() -> None:
    marks = compute_marks(EvaluationSpec(first_mark=1000, marks_per_doubling=2))
    # 1000 * sqrt(2) = 1414.2, 2000 * sqrt(2) = 2828.4
    assert list(islice(marks, 5)) == [1000, 1414, 2000, 2828, 4000]


def test_a_cell_is_evaluated_at_its_first_step_that_reaches_a_mark() -> None:
    evaluation = EvaluationSpec(first_mark=100, marks_per_doubling=1)
    cell = Cell(problems_per_batch=10, rollouts_per_problem=6, seed=0, update_steps=14, learning_rate=1e-3)
    # Marks 100, 200, 400, 800 at B = 60: steps 2 (120), 4 (240), 7 (420), 14 (840).
    assert evaluated_steps(cell, evaluation) == [2, 4, 7, 14]


def test_marks_that_fall_on_one_step_make_one_evaluation() -> None:
    evaluation = EvaluationSpec(first_mark=100, marks_per_doubling=2)
    cell = Cell(problems_per_batch=100, rollouts_per_problem=4, seed=0, update_steps=2, learning_rate=1e-3)
    # Marks 100, 141, 200, 283, 400 all fall on step 1, and 566, 800 on step 2.
    assert evaluated_steps(cell, evaluation) == [1, 2]


def test_a_larger_budget_does_not_change_the_marks_so_far() -> None:
    evaluation = EvaluationSpec(first_mark=100, marks_per_doubling=3)
    short = Cell(problems_per_batch=10, rollouts_per_problem=7, seed=0, update_steps=20, learning_rate=1e-3)
    long = Cell(problems_per_batch=10, rollouts_per_problem=7, seed=0, update_steps=90, learning_rate=1e-3)
    steps = evaluated_steps(short, evaluation)
    assert evaluated_steps(long, evaluation)[: len(steps)] == steps


def test_a_canary_is_two_steps_of_the_first_cells_of_the_smallest_and_the_largest_batch() -> None:
    spec = grid(
        "problems_per_batch: [16, 32], rollouts_per_problem: [4, 16], seeds: [7, 3], compute_rollouts: 4096"
    )
    canary = canary_of(spec)
    assert canary.name == f"{spec.name}-canary"
    # C = 4096 at B = 64 and B = 512 are 64 and 8 steps.
    assert [(cell.id, cell.update_steps) for cell in expand(canary)] == [
        ("bp16-n4-s3", 2),
        ("bp32-n16-s3", 2),
    ]
    by_id = {cell.id: cell for cell in expand(spec)}
    assert all(replace(by_id[cell.id], update_steps=2) == cell for cell in expand(canary))


def test_a_canary_has_one_cell_where_all_batches_are_equal_and_no_more_steps_than_it_has() -> None:
    spec = grid("problems_per_batch: [16], rollouts_per_problem: [4], seeds: [7, 3], compute_rollouts: 64")
    assert [(cell.id, cell.update_steps) for cell in expand(canary_of(spec))] == [("bp16-n4-s3", 1)]

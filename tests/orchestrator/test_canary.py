"""Which cells a canary trains, and for how long."""

from dataclasses import replace

from grids.expansion import expand
from grids.loading import parse_grid
from orchestrator.control.canary import canary_cells, canary_spec
from tests.grids.test_spec import GRID, PATH

SPEC = parse_grid(GRID, PATH)


def test_two_steps_of_the_first_cells_of_the_smallest_and_the_largest_batch() -> None:
    cells = expand(SPEC)
    small, large = canary_cells(cells)
    batches = [cell.batch_rollouts for cell in cells]
    assert (small.batch_rollouts, large.batch_rollouts) == (min(batches), max(batches))
    assert (small.update_steps, large.update_steps) == (2, 2)
    by_id = {cell.id: cell for cell in cells}
    for cell in (small, large):
        assert cell == replace(by_id[cell.id], update_steps=2)
        assert cell.seed == min(SPEC.grid.seeds)


def test_one_cell_where_all_batches_are_equal_and_no_more_steps_than_it_has() -> None:
    (first, *_) = expand(SPEC)
    (cell,) = canary_cells([replace(first, update_steps=1), replace(first, seed=99, update_steps=1)])
    assert cell == replace(first, update_steps=1)


def test_its_metrics_are_not_the_grids() -> None:
    assert canary_spec(SPEC).name == f"{SPEC.name}-canary"
    assert canary_spec(SPEC).grid == SPEC.grid
